// Package takeover takes a socket directory and a pool's file over from the previous agent, and
// ends the movers that it left running.
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

	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/dram"
)

// New makes a Takeover that waits for at most wait in all.
func New(wait time.Duration, left *Orphans, log *zap.Logger) *Takeover {
	return &Takeover{wait: wait, log: log, left: left}
}

// Takeover waits for an ending agent to release what this one needs. The kernel releases files only
// after it has unmapped a dead agent's memory, which takes seconds for a large pool. It does not
// wait for an agent that keeps running.
type Takeover struct {
	wait time.Duration // in all
	log  *zap.Logger
	end  time.Time // of the wait, once it has begun
	left *Orphans
}

const (
	poll = 20 * time.Millisecond
	// grace is how long a process must be seen running to count as one that keeps running, because
	// a deadly signal takes a moment.
	grace = 300 * time.Millisecond
)

// Admin takes the socket directory, and waits until the previous agent has exited and its memory is
// released.
func (t *Takeover) Admin(ctx context.Context, dir string, group int) (l *socketdir.Listener, err error) {
	before, known := lockHolder(dir)
	err = t.until(ctx, func() error {
		l, err = socketdir.ListenAdmin(dir, group)
		return err
	}, func(err error) (stays, held bool) {
		if !errors.Is(err, socketdir.ErrInUse) {
			return false, false
		}
		pid, ok := lockHolder(dir)
		return !ok || !ending(pid), true
	})
	if err != nil || !known || before == os.Getpid() {
		return l, err
	}
	for ending(before) && !Exited(before) && t.pause(ctx) { // only its memory remains
	}
	return l, nil
}

// Pool opens the pool in the file of path, which another process may hold. It abandons a file whose
// holder cannot be ended.
func (t *Takeover) Pool(ctx context.Context, path string, open func() (*dram.Pool, error)) (p *dram.Pool, err error) {
	p, err = t.openPool(ctx, open)
	var by *dram.HeldError
	if errors.As(err, &by) && ctx.Err() == nil && t.left.holds(by) {
		if bad := t.left.abandonFile(path, err); bad != nil {
			return nil, errors.Join(err, bad)
		}
		p, err = t.openPool(ctx, open)
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
		return by.Process != 0 && !by.Exited && !ending(by.Process), true
	})
	return p, err
}

// until retries open until it succeeds, its holder is one that keeps running, or the time is over.
func (t *Takeover) until(ctx context.Context, open func() error, judge func(error) (stays, held bool)) error {
	var alive time.Time // since when the holder is seen running
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
			t.log.Info("waiting for another agent to end", zap.Duration("at_most", t.wait), zap.Error(err))
		}
		if !t.pause(ctx) {
			return fmt.Errorf("waited %v: %w", t.wait, err)
		}
	}
}

// pause waits a little. It returns false when the time is over.
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

// lockHolder returns the process that locked a socket directory last.
func lockHolder(dir string) (pid int, ok bool) {
	text, err := os.ReadFile(filepath.Join(dir, socketdir.Admin+".lock"))
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

// ending reports whether a process has ended, is exiting, or has a pending SIGKILL.
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

// Exited reports whether a process has ended; it may still be a zombie.
func Exited(pid int) bool {
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
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", 0, false
	}
	// The process's name, before the last bracket, may hold anything.
	words := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(words) < 7 {
		return "", 0, false
	}
	flags, err = strconv.ParseUint(words[6], 10, 64)
	return words[0], flags, err == nil
}
