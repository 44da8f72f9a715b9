package running

import (
	"context"
	"sync"
)

// Counter counts the running jobs of all workers; a drain waits for it. Its methods may run
// concurrently.
type Counter struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n reaches 0; nil: not waited for
}

// Add counts one more.
func (c *Counter) Add() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
}

// Done counts one less.
func (c *Counter) Done() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n--
	if c.n == 0 && c.idle != nil {
		close(c.idle)
		c.idle = nil
	}
}

// Count returns how many run.
func (c *Counter) Count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// Wait returns when no job runs, or with the context's error.
func (c *Counter) Wait(ctx context.Context) error {
	c.mu.Lock()
	if c.n == 0 {
		c.mu.Unlock()
		return nil
	}
	if c.idle == nil {
		c.idle = make(chan struct{})
	}
	idle := c.idle
	c.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
