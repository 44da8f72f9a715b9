package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/pool/dram"
)

// leftBehind is what agents before this one left: movers that this one ends, or waits for as long
// as it runs.
type leftBehind struct {
	log  *zap.Logger
	kill func(pidfd int) error // nil: SIGKILL

	unseen bool      // the agent before was in another namespace of processes
	agents []process // that had the directory, in this life of the machine

	mu struct {
		sync.Mutex
		ended   uint64
		cold    string // why the pool's file was given up; empty: it was not
		running []leftMover
	}
}

// leftMover is a process that is still there: it was killed, or could not be.
type leftMover struct {
	recordedMover
	pidfd int  // negative: none could be had
	slow  bool // it has begun its end, or was not killed and may end by itself
}

const (
	// leftEndWithin is how long a killed process may take to begin its end. One that has not is in
	// a call of the kernel, or of a driver, that does not return, and cannot be ended by anybody.
	leftEndWithin = 2 * time.Second
	// leftMarkWithin is how long the reading of a process's environment may take: it waits for the
	// process's memory, which a stuck call may have locked.
	leftMarkWithin = 500 * time.Millisecond
	leftPoll       = 50 * time.Millisecond
	leftWatch      = time.Second // how often those that could not be ended are looked at
)

// end ends what the agent that had the directory before left running. The directory's lock is held:
// that agent is dead, or has ended its sessions and is about to end its movers itself.
func (l *leftBehind) end(ctx context.Context, dir string) {
	f, err := readMovers(dir)
	if err != nil {
		l.log.Warn("the movers of the agent before are not known", zap.Error(err))
		return
	}
	if len(f.Movers) == 0 || f.Machine != machineID() {
		return
	}
	for _, m := range f.Movers {
		l.agents = append(l.agents, m.Agent)
	}
	if f.Namespace != namespaceID() {
		l.unseen = true
		l.log.Warn("the agent before was in another namespace of processes: its movers cannot be ended from here",
			zap.Int("movers", len(f.Movers)))
		return
	}
	var killed []leftMover
	for _, m := range f.Movers {
		if fd, err := l.strike(m); err == nil {
			killed = append(killed, leftMover{recordedMover: m, pidfd: fd})
		} else if !errors.Is(err, unix.ESRCH) {
			l.leaveAlone(leftMover{recordedMover: m, pidfd: fd, slow: true}, err)
		}
	}
	until := time.Now().Add(leftEndWithin)
	for _, m := range killed {
		l.await(ctx, m, until)
	}
}

// leaveAlone keeps a process that was not killed: it may be a mover, which holds what movers hold.
func (l *leftBehind) leaveAlone(m leftMover, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.running = append(l.mu.running, m)
	l.log.Warn("a process that may be a mover of the agent before is left alone", zap.Int("pid", m.PID), zap.Error(why))
}

// strike kills a process if it is the one that was written down, and gives a descriptor of it.
// ESRCH: there is none such any more. After any other error the process may be that one, and fd is
// negative if it could not be opened.
func (l *leftBehind) strike(m recordedMover) (fd int, err error) {
	if m.PID <= 1 || m.PID == os.Getpid() {
		return -1, fmt.Errorf("process %d: allowed is another one's mover: %w", m.PID, unix.ESRCH)
	}
	// From here on the descriptor, and not the number, is the process: what is read of the number
	// is that one's, if it is still there afterwards.
	if fd, err = unix.PidfdOpen(m.PID, 0); err != nil {
		if m.replaced() {
			err = unix.ESRCH
		}
		return -1, err
	}
	err = m.check()
	if ended(fd, 0) {
		err = unix.ESRCH
	}
	if err == nil {
		kill := l.kill
		if kill == nil {
			kill = func(fd int) error { return unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) }
		}
		err = kill(fd)
	}
	if errors.Is(err, unix.ESRCH) {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, err
}

// replaced says whether a process's number was given to another one. When a process began may be
// hidden, which says nothing.
func (m *recordedMover) replaced() bool {
	n := began(m.PID)
	return n != 0 && m.Began != 0 && n != m.Began
}

// check says why a process is not, or may not be, the one that was written down.
func (m *recordedMover) check() error {
	if m.replaced() {
		return unix.ESRCH
	}
	if n := began(m.PID); n != m.Began || n == 0 {
		return fmt.Errorf("process %d: when it began is not known", m.PID)
	}
	exe, err := exeOf(m.PID)
	if err != nil {
		return fmt.Errorf("the file that process %d runs: %w", m.PID, err)
	}
	if exe != m.Exe || exe == (fileID{}) {
		return fmt.Errorf("process %d runs another file", m.PID)
	}
	return m.checkMark()
}

// checkMark looks for the mark in a process's environment. Where that cannot be read in time the
// process waits in the kernel, and all else has to do.
func (m *recordedMover) checkMark() error {
	marked := make(chan error, 1)
	go func() { // ends when the process does, at the latest
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", m.PID))
		if err == nil && !slices.Contains(strings.Split(string(text), "\x00"), markEnv+"="+m.Mark) {
			err = fmt.Errorf("process %d has not the mark of that agent's movers in its environment", m.PID)
		}
		marked <- err
	}()
	select {
	case err := <-marked:
		return err
	case <-time.After(leftMarkWithin):
		return nil
	}
}

// ended waits for the end of a process: of all of it but what its parent has to collect.
func ended(pidfd int, within time.Duration) bool {
	for until := time.Now().Add(within); ; {
		fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(max(time.Until(until), 0)/time.Millisecond))
		if !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}

// await waits for a process that was killed.
func (l *leftBehind) await(ctx context.Context, m leftMover, until time.Time) {
	over := false
	for !over && time.Now().Before(until) && ctx.Err() == nil {
		over = ended(m.pidfd, leftPoll)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if over {
		_ = unix.Close(m.pidfd)
		l.mu.ended++
		l.log.Info("a mover that the agent before left is ended", zap.Int("pid", m.PID))
		return
	}
	m.slow = exiting(m.PID)
	l.mu.running = append(l.mu.running, m)
	l.log.Error("a mover of the agent before does not end: it keeps the memory of its engines and of its pool",
		zap.Int("pid", m.PID), zap.Bool("has_begun_to", m.slow), zap.Duration("waited", leftEndWithin))
}

// exiting says whether every thread of a process has begun its end. One that has not waits in the
// kernel for what does not come.
func exiting(pid int) bool {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return true
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err != nil {
			continue
		}
		if _, flags, ok := processState(tid); ok && flags&flagExiting == 0 {
			return false
		}
	}
	return true
}

// left are the processes that could not be ended.
func (l *leftBehind) left() (out []recordedMover) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.mu.running {
		out = append(out, m.recordedMover)
	}
	return out
}

// holds says whether a pool's file is held by what cannot be ended: the movers of the agent that
// signed it, if that agent had this directory. patient says that those may only be slow to end. The
// signer's host does not count: a new pod has another name, and l.agents are of this machine's life.
func (l *leftBehind) holds(by *dram.HeldError) (held, patient bool) {
	signer := process{by.Process, by.Began}
	if by.Process == 0 || !slices.Contains(l.agents, signer) {
		return false, false
	}
	l.takeEnded()
	l.mu.Lock()
	defer l.mu.Unlock()
	held, patient = l.unseen, true
	for _, m := range l.mu.running {
		if m.Agent == signer {
			held, patient = true, patient && m.slow
		}
	}
	return held, patient
}

// giveUp takes the name from a file that another process will not let go of, so that a new one can
// have it. Its memory is held until that process is gone. To shrink the file would free it sooner
// where no device has pinned it; but a process that still runs would be ended by its next copy, and
// one that is stuck with a page of the file locked would make this agent as stuck.
func (l *leftBehind) giveUp(path string, why error) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.cold = why.Error()
	l.log.Error("the pool's file is given up: what holds it cannot be ended; the pool starts empty, in a new file",
		zap.String("path", path), zap.Error(why))
	return nil
}

// watch waits for the processes that could not be ended until ctx is done, and says when one is
// gone.
func (l *leftBehind) watch(ctx context.Context, gone func(process)) {
	tick := time.NewTicker(leftWatch)
	defer tick.Stop()
	for len(l.left()) > 0 {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, m := range l.takeEnded() {
			gone(m.process)
		}
	}
}

// over says whether a process has ended. Of one without a descriptor the number says so.
func (m *leftMover) over() bool {
	if m.pidfd < 0 {
		return m.replaced() || errors.Is(unix.Kill(m.PID, 0), unix.ESRCH)
	}
	return ended(m.pidfd, 0)
}

func (l *leftBehind) takeEnded() (out []leftMover) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.running = slices.DeleteFunc(l.mu.running, func(m leftMover) bool {
		if !m.over() {
			return false
		}
		if m.pidfd >= 0 {
			_ = unix.Close(m.pidfd)
		}
		l.mu.ended++
		l.log.Info("a mover that the agent before left has ended at last", zap.Int("pid", m.PID))
		out = append(out, m)
		return true
	})
	return out
}

// status is what /status and the metrics say.
func (l *leftBehind) status() agent.LeftBehind {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := agent.LeftBehind{Ended: l.mu.ended, Cold: l.mu.cold, PIDs: []int{}}
	for _, m := range l.mu.running {
		out.PIDs = append(out.PIDs, m.PID)
	}
	return out
}
