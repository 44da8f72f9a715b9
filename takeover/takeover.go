// Package takeover takes a socket directory and a pool's file over from the agent that had them
// before, and ends the movers that it left.
package takeover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool/dram"
)

// New makes one that waits for so long in all.
func New(wait time.Duration, left *Left, log *zap.Logger) *Takeover {
	return &Takeover{wait: wait, log: log, left: left}
}

// Takeover waits for an agent that is ending to let go of what this one needs. The kernel lets go of files only when it
// has unmapped a dead agent's memory, which takes seconds for a large pool. One that lives and stays is not waited for.
type Takeover struct {
	wait time.Duration // in all
	log  *zap.Logger
	end  time.Time // of the wait, once it has begun
	left *Left
}

const (
	poll = 20 * time.Millisecond
	// grace is how long a process must be seen alive to be one that stays: a signal that kills takes a moment.
	grace = 300 * time.Millisecond
)

// Admin takes the socket directory, and waits until the agent that had it is gone, its memory too.
func (t *Takeover) Admin(ctx context.Context, dir string, group int) (l *ipc.UnixListener, err error) {
	before, known := lockHolder(dir)
	err = t.until(ctx, func() error {
		l, err = admin.ListenAdmin(dir, group)
		return err
	}, func(err error) (stays, held bool) {
		if !errors.Is(err, ipc.ErrInUse) {
			return false, false
		}
		pid, ok := lockHolder(dir)
		return !ok || !ending(pid), true
	})
	if err != nil || !known || before == os.Getpid() {
		return l, err
	}
	for ending(before) && !Gone(before) && t.pause(ctx) { // it holds nothing but memory
	}
	return l, nil
}

// Pool opens the pool in the file of path, which another process may have. One that is held by what
// cannot be ended is given up.
func (t *Takeover) Pool(ctx context.Context, path string, open func() (*dram.Pool, error)) (p *dram.Pool, err error) {
	p, err = t.openPool(ctx, open)
	var by *dram.HeldError
	if errors.As(err, &by) && ctx.Err() == nil {
		if held, _ := t.left.holds(by); held {
			if bad := t.left.giveUp(path, err); bad != nil {
				return nil, errors.Join(err, bad)
			}
			p, err = t.openPool(ctx, open)
		}
	}
	return p, err
}

func (t *Takeover) openPool(ctx context.Context, open func() (*dram.Pool, error)) (p *dram.Pool, err error) {
	err = t.until(ctx, func() error {
		p, err = open()
		return err
	}, func(err error) (stays, held bool) {
		var by *dram.HeldError
		if !errors.As(err, &by) {
			return false, false
		}
		if held, patient := t.left.holds(by); held && !patient {
			return false, false // there is nothing to wait for
		}
		return by.Process != 0 && !by.Exited && !ending(by.Process), true
	})
	return p, err
}

// until tries to open something until nobody holds it, somebody does who stays, or the time is over.
func (t *Takeover) until(ctx context.Context, open func() error, judge func(error) (stays, held bool)) error {
	var alive time.Time // since when the holder is seen to stay
	for {
		err := open()
		stays, held := judge(err)
		switch now := time.Now(); {
		case err == nil || !held:
			return err
		case !stays:
			alive = time.Time{}
		case alive.IsZero():
			alive = now
		case now.Sub(alive) >= grace:
			return err
		}
		if t.end.IsZero() {
			t.log.Info("waiting for another agent to let go", zap.Duration("at_most", t.wait), zap.Error(err))
		}
		if !t.pause(ctx) {
			return fmt.Errorf("waited %v (takeover-wait): %w", t.wait, err)
		}
	}
}

// pause waits a little; false when the time is over.
func (t *Takeover) pause(ctx context.Context) bool {
	now := time.Now()
	if t.end.IsZero() {
		t.end = now.Add(t.wait)
	}
	if !now.Before(t.end) {
		return false
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(poll):
		return true
	}
}

// lockHolder is the process that locked a socket directory last.
func lockHolder(dir string) (pid int, ok bool) {
	text, err := os.ReadFile(filepath.Join(dir, ipc.AdminSocket+".lock"))
	if err != nil {
		return 0, false
	}
	pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
	return pid, err == nil && pid > 0
}

const (
	flagExiting = 0x4    // PF_EXITING of the kernel's include/linux/sched.h
	bitKill     = 1 << 8 // SIGKILL in a mask of signals
)

// ending is true for a process that is gone, has begun to end, or is about to because it was killed.
func ending(pid int) bool {
	state, flags, ok := processState(pid)
	if !ok || state == "Z" || state == "X" || flags&flagExiting != 0 {
		return true
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(text)) {
		key, mask, _ := strings.Cut(strings.TrimSpace(line), ":\t")
		if key != "SigPnd" && key != "ShdPnd" {
			continue
		}
		if n, err := strconv.ParseUint(mask, 16, 64); err == nil && n&bitKill != 0 {
			return true
		}
	}
	return false
}

// Gone is true when nothing is left of a process but what its parent has to collect.
func Gone(pid int) bool {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return true
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err != nil {
			continue
		}
		if state, _, ok := processState(tid); ok && state != "Z" && state != "X" {
			return false
		}
	}
	return true
}

// processState reads the state and the flags of a process or thread.
func processState(pid int) (state string, flags uint64, ok bool) {
	words := processWords(strconv.Itoa(pid))
	if words == nil {
		return "", 0, false
	}
	flags, err := strconv.ParseUint(words[6], 10, 64)
	return words[0], flags, err == nil
}

// processWords returns the words after a process's name, which may hold anything itself; nil: there is
// no such process.
func processWords(pid string) []string {
	text, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return nil
	}
	words := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(words) < 20 {
		return nil
	}
	return words
}
