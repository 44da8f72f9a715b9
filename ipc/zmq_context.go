package ipc

import (
	"errors"
	"fmt"
	"io"
	"sync"

	zmq "github.com/pebbe/zmq4"
)

// MaxLookupSockets is how many look-up servers and clients one Context holds.
const MaxLookupSockets = 256

// Context is a process's ZeroMQ: its threads, and the look-up sockets made from it. One is enough for a process.
// Its methods may be called from any goroutine.
type Context struct {
	z  *zmq.Context
	mu struct {
		sync.Mutex
		open   map[io.Closer]struct{}
		serial int
		closed bool
	}
}

// NewContext starts ZeroMQ.
func NewContext() (*Context, error) {
	if err := checkLayout(); err != nil {
		return nil, err
	}
	keepDescriptor()
	z, err := zmq.NewContext()
	if err != nil {
		return nil, fmt.Errorf("zmq: %w", err)
	}
	c := &Context{z: z}
	c.mu.open = map[io.Closer]struct{}{}
	return c, nil
}

// add enters a server or client, and gives it a number of its own.
func (c *Context) add(s io.Closer) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return 0, fmt.Errorf("look-up context: %w", ErrClosed)
	}
	if len(c.mu.open) >= MaxLookupSockets {
		return 0, fmt.Errorf("look-up sockets: more than %d", MaxLookupSockets)
	}
	c.mu.open[s] = struct{}{}
	c.mu.serial++
	return c.mu.serial, nil
}

func (c *Context) remove(s io.Closer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.open, s)
}

// Close closes what is still open, waits for answers on their way at most lookupLinger, and ends ZeroMQ.
func (c *Context) Close() error {
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		return nil
	}
	c.mu.closed = true
	left := make([]io.Closer, 0, len(c.mu.open))
	for s := range c.mu.open {
		left = append(left, s)
	}
	c.mu.Unlock()
	var err error
	for _, s := range left {
		err = errors.Join(err, s.Close())
	}
	return errors.Join(err, c.z.Term())
}
