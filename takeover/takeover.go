// Package takeover takes a socket directory and a pool's file over from the previous agent.
package takeover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/dram"
)

// Takeover waits for another agent to release what this one needs. The kernel releases files only
// after it has unmapped a dead agent's memory, which takes seconds for a large pool.
type Takeover struct {
	wait   time.Duration // in all
	log    *zap.Logger
	end    time.Time // of the wait, once it has begun
	before holder    // of the directory's lock, the last one; zero: not known
}

// holder is a process with its start, in clock ticks since boot: another namespace may have the
// pid.
type holder struct {
	pid   int
	began uint64
}

// New makes a Takeover that waits for at most wait in all.
func New(wait time.Duration, log *zap.Logger) *Takeover { return &Takeover{wait: wait, log: log} }

const poll = 20 * time.Millisecond

// Admin takes the socket directory.
func (t *Takeover) Admin(ctx context.Context, dir string, group int) (l *socketdir.Listener, err error) {
	text, _ := os.ReadFile(socketdir.LockPath(dir)) // a missing one names no process
	_, _ = fmt.Sscan(string(text), &t.before.pid, &t.before.began)
	inUse := func(err error) bool { return errors.Is(err, socketdir.ErrInUse) }
	err = t.until(ctx, inUse, func() error {
		l, err = socketdir.ListenAdmin(dir, group)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := l.Sign(strconv.FormatUint(dram.ProcessBegan(os.Getpid()), 10)); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Pool opens the pool, in the file of path if that is not empty. It waits for the previous agent's
// movers, which have the memory of its pool for up to 2 s. If a mover keeps the file whose agent
// has ended, Pool abandons the file and opens a new one. abandoned says why; empty: it was not.
func (t *Takeover) Pool(
	ctx context.Context, path string, open func() (*dram.Pool, error),
) (p *dram.Pool, abandoned string, err error) {
	try := func() error {
		p, err = open()
		return err
	}
	err = t.until(ctx, func(err error) bool {
		return errors.Is(err, dram.ErrHeld) || errors.Is(err, dram.ErrNoMemory) && t.before.pid != 0
	}, try)
	var by *dram.HeldError
	if !errors.As(err, &by) || ctx.Err() != nil || !t.hasEnded(by) {
		return p, "", err
	}
	t.log.Error("the pool's file is abandoned: its agent has ended, and a mover that does not end holds it; the pool "+
		"starts empty, in a new file", zap.String("path", path), zap.Error(err))
	abandoned = err.Error()
	// The file's memory is freed when its holder ends. Truncating it would kill one that copies.
	if err := os.Remove(path); err != nil {
		return nil, "", err
	}
	return p, abandoned, try()
}

// hasEnded reports whether the agent that signed a pool's file has ended, by its process, if that
// can be seen from here, or because it had the directory that this agent has now.
func (t *Takeover) hasEnded(by *dram.HeldError) bool {
	host, _ := os.Hostname()
	return by.Exited && (by.Host == host || holder{by.Process, by.Began} == t.before)
}

// until retries open as long as its error is one to wait for, until the time is over.
func (t *Takeover) until(ctx context.Context, waits func(error) bool, open func() error) error {
	for {
		err := open()
		if err == nil || !waits(err) {
			return err
		}
		if t.end.IsZero() {
			t.end = time.Now().Add(t.wait)
			t.log.Info("waiting for another agent to end", zap.Duration("at_most", t.wait), zap.Error(err))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited: %w", err)
		case <-time.After(poll):
		}
		if !time.Now().Before(t.end) {
			return fmt.Errorf("waited %v: %w", t.wait, err)
		}
	}
}
