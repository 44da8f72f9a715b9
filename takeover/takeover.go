// Package takeover takes a socket directory and a pool's file over from the previous agent.
package takeover

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/dram"
)

// Takeover waits for another agent to release what this one needs. The kernel releases files only
// after it has unmapped a dead agent's memory, which takes seconds for a large pool.
type Takeover struct {
	wait    time.Duration // for the directory, and for the file
	log     *zap.Logger
	end     time.Time // of the wait, once it has begun
	follows bool      // another agent had the directory
}

// New makes a Takeover that waits at most wait for the directory, and as long for the pool's file.
func New(wait time.Duration, log *zap.Logger) *Takeover { return &Takeover{wait: wait, log: log} }

const poll = 20 * time.Millisecond

// Admin takes the socket directory.
func (t *Takeover) Admin(ctx context.Context, dir string, group int) (l *socketdir.Listener, err error) {
	_, err = os.Stat(socketdir.LockPath(dir))
	t.follows = err == nil
	inUse := func(err error) bool { return errors.Is(err, socketdir.ErrInUse) }
	err = t.until(ctx, inUse, func() error {
		l, err = socketdir.ListenAdmin(dir, group)
		return err
	})
	return l, err
}

// Pool opens the pool, in the file of path if that is not empty. It waits for the previous agent's
// movers, which have the memory of its pool for up to 2 s. If a mover keeps the file whose agent
// has ended, Pool abandons the file and opens a new one. abandoned says why; empty: it was not.
func (t *Takeover) Pool(
	ctx context.Context, path string, open func(abandon bool) (*dram.Pool, error),
) (p *dram.Pool, abandoned string, err error) {
	t.end = time.Time{} // the agent that had the directory until now may have left its movers
	try := func() error {
		p, err = open(false)
		return err
	}
	var held *dram.HeldError
	err = t.until(ctx, func(err error) bool {
		return errors.As(err, &held) || errors.Is(err, dram.ErrNoMemory) && t.follows
	}, try)
	if !errors.As(err, &held) || !held.Orphan || ctx.Err() != nil {
		return p, "", err
	}
	t.log.Error("the pool's file is abandoned: its agent has ended, and a mover that does not end holds it; the pool "+
		"starts empty, in a new file", zap.String("path", path), zap.Error(err))
	abandoned = err.Error()
	p, err = open(true)
	return p, abandoned, err
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
