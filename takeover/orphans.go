package takeover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/pool/dram"
)

// Orphans are the movers that earlier agents left running. This agent ends them, or watches them as
// long as it runs.
type Orphans struct {
	log  *zap.Logger
	kill func(pidfd int) error // nil: SIGKILL

	unseen bool      // the previous agent was in another PID namespace
	agents []Process // earlier agents of the directory since the machine's boot

	mu struct {
		sync.Mutex
		ended   uint64
		cold    string // why the pool's file was abandoned; empty: it was not
		running []orphan
	}
}

// NewOrphans makes an Orphans that ends movers by kill; nil: SIGKILL.
func NewOrphans(kill func(pidfd int) error, log *zap.Logger) *Orphans {
	return &Orphans{log: log, kill: kill}
}

// orphan is a mover that still runs, although it was killed, or because it could not be.
type orphan struct {
	Mover
	pidfd int // negative: it could not be opened
}

const (
	// orphanEndLimit is how long a killed process may take to begin to exit. One that takes longer
	// is in a call of the kernel or of a driver that does not return, and cannot be ended.
	orphanEndLimit = 2 * time.Second
	leftPoll       = 50 * time.Millisecond
	orphanPoll     = time.Second // interval at which running orphans are checked
)

// End ends the movers that the directory's previous agent left running. The caller holds the
// directory's lock: that agent is dead, or has ended its sessions and is about to end its movers
// itself.
func (o *Orphans) End(ctx context.Context, dir string) {
	f, err := ReadMovers(dir)
	if err != nil {
		o.log.Warn("the list of the previous agent's movers cannot be read", zap.Error(err))
		return
	}
	if len(f.Movers) == 0 || f.Machine != machineID() {
		return
	}
	for _, m := range f.Movers {
		o.agents = append(o.agents, m.Agent)
	}
	if f.Namespace != namespaceID() {
		o.unseen = true
		o.log.Warn("the previous agent was in another PID namespace: its movers cannot be ended from here",
			zap.Int("movers", len(f.Movers)))
		return
	}
	var killed []orphan
	for _, m := range f.Movers {
		if fd, err := o.strike(m); err == nil {
			killed = append(killed, orphan{Mover: m, pidfd: fd})
		} else if !errors.Is(err, unix.ESRCH) {
			o.addUnkilled(orphan{Mover: m, pidfd: fd}, err)
		}
	}
	until := time.Now().Add(orphanEndLimit)
	for _, m := range killed {
		o.await(ctx, m, until)
	}
}

// addUnkilled records a process that was not killed: it may be a mover, and hold a mover's
// resources.
func (o *Orphans) addUnkilled(m orphan, why error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.running = append(o.mu.running, m)
	o.log.Warn("a process that may be a mover of the previous agent is not killed", zap.Int("pid", m.PID),
		zap.Error(why))
}

// strike kills a process if it is the recorded one, and returns its pidfd. ESRCH means that it has
// ended. After any other error the process may be the recorded one, and fd is negative if it could
// not be opened.
func (o *Orphans) strike(m Mover) (fd int, err error) {
	if m.PID <= 1 || m.PID == os.Getpid() {
		return -1, fmt.Errorf("process %d: allowed is another one's mover: %w", m.PID, unix.ESRCH)
	}
	// From here on the descriptor identifies the process. A value read by the process's number is
	// valid if the process still exists afterwards.
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
		kill := o.kill
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

// replaced reports whether a process's number was reused. A hidden start time is no evidence of
// that.
func (m *Mover) replaced() bool {
	n := dram.ProcessBegan(m.PID)
	return n != 0 && m.Began != 0 && n != m.Began
}

// check returns an error if a process is not, or may not be, the recorded one.
func (m *Mover) check() error {
	if m.replaced() {
		return unix.ESRCH
	}
	if n := dram.ProcessBegan(m.PID); n != m.Began || n == 0 {
		return fmt.Errorf("process %d: its start time is not known", m.PID)
	}
	return nil
}

// ended waits until a process has exited; it may still be a zombie.
func ended(pidfd int, within time.Duration) bool {
	for until := time.Now().Add(within); ; {
		fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, int(max(time.Until(until), 0)/time.Millisecond))
		if !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}

// await waits for the end of a killed process.
func (o *Orphans) await(ctx context.Context, m orphan, until time.Time) {
	over := false
	for !over && time.Now().Before(until) && ctx.Err() == nil {
		over = ended(m.pidfd, leftPoll)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if over {
		_ = unix.Close(m.pidfd)
		o.mu.ended++
		o.log.Info("a mover of the previous agent was ended", zap.Int("pid", m.PID))
		return
	}
	o.mu.running = append(o.mu.running, m)
	o.log.Error("a mover of the previous agent does not end: it keeps the memory of its engines and of its pool",
		zap.Int("pid", m.PID), zap.Duration("waited", orphanEndLimit))
}

// Running returns the processes that could not be ended.
func (o *Orphans) Running() (out []Mover) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, m := range o.mu.running {
		out = append(out, m.Mover)
	}
	return out
}

// holds reports whether a pool's file is held by movers that could not be ended: those of the agent
// that signed it, if that agent had this directory. The signer's host is ignored: a new pod has
// another name, and o.agents ran since this machine's boot.
func (o *Orphans) holds(by *dram.HeldError) bool {
	signer := Process{by.Process, by.Began}
	if by.Process == 0 || !slices.Contains(o.agents, signer) {
		return false
	}
	o.takeEnded()
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.unseen || slices.ContainsFunc(o.mu.running, func(m orphan) bool { return m.Agent == signer })
}

// abandonFile removes a file that another process holds, so that a new file can have its name. The
// file's memory is freed when that process ends. Truncating it would free memory that no device has
// pinned sooner, but the next copy would kill a running holder, and a stuck holder with a locked
// page of the file would block this agent.
func (o *Orphans) abandonFile(path string, why error) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.cold = why.Error()
	o.log.Error("the pool's file is abandoned: the process that holds it cannot be ended; the pool starts empty, in "+
		"a new file",
		zap.String("path", path), zap.Error(why))
	return nil
}

// Watch watches the processes that could not be ended until ctx is done, and calls gone when one
// has ended.
func (o *Orphans) Watch(ctx context.Context, gone func(Process)) {
	tick := time.NewTicker(orphanPoll)
	defer tick.Stop()
	for len(o.Running()) > 0 {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, m := range o.takeEnded() {
			gone(m.Process)
		}
	}
}

// hasEnded reports whether a process has ended; without a descriptor it decides by the number.
func (m *orphan) hasEnded() bool {
	if m.pidfd < 0 {
		return m.replaced() || errors.Is(unix.Kill(m.PID, 0), unix.ESRCH)
	}
	return ended(m.pidfd, 0)
}

func (o *Orphans) takeEnded() (out []orphan) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mu.running = slices.DeleteFunc(o.mu.running, func(m orphan) bool {
		if !m.hasEnded() {
			return false
		}
		if m.pidfd >= 0 {
			_ = unix.Close(m.pidfd)
		}
		o.mu.ended++
		o.log.Info("a mover of the previous agent has ended by itself", zap.Int("pid", m.PID))
		out = append(out, m)
		return true
	})
	return out
}

// Status returns the state for /status and the metrics.
func (o *Orphans) Status() report.Orphans {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := report.Orphans{Ended: o.mu.ended, Cold: o.mu.cold, PIDs: []int{}}
	for _, m := range o.mu.running {
		out.PIDs = append(out.PIDs, m.PID)
	}
	return out
}
