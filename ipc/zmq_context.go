package ipc

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
)

// MaxLookupSockets is how many look-up servers and clients one Context holds.
const MaxLookupSockets = 256

// Context is the look-up sockets of a process, servers and clients. Only clients need ZeroMQ's library, which is started
// with the first of them. One is enough for a process. Its methods may be called from any goroutine.
type Context struct {
	peers struct { // connections to all its servers
		most int64 // 0: no bound
		now  atomic.Int64
	}

	mu struct {
		sync.Mutex
		z      *zmqLibrary // nil: no client yet
		open   map[io.Closer]struct{}
		closed bool
	}
}

// NewContext makes a context without sockets.
func NewContext() (*Context, error) {
	c := &Context{}
	c.mu.open = map[io.Closer]struct{}{}
	return c, checkLayout()
}

// LimitPeers bounds the connections to all servers of the context together; one more is closed, as one beyond
// MaxLookupPeers of its server is. It is called before the first server is there.
func (c *Context) LimitPeers(n int64) { c.peers.most = n }

// enter counts a connection to a server; false: there are too many.
func (c *Context) enter() bool {
	if n := c.peers.now.Add(1); c.peers.most == 0 || n <= c.peers.most {
		return true
	}
	c.leave()
	return false
}

func (c *Context) leave() { c.peers.now.Add(-1) }

// zmq is the library's context, started at first.
func (c *Context) zmq() (*zmqLibrary, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return nil, fmt.Errorf("look-up context: %w", ErrClosed)
	}
	if c.mu.z == nil {
		z, err := startZMQ()
		if err != nil {
			return nil, err
		}
		c.mu.z = z
	}
	return c.mu.z, nil
}

// add enters a server or client.
func (c *Context) add(s io.Closer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return fmt.Errorf("look-up context: %w", ErrClosed)
	}
	if len(c.mu.open) >= MaxLookupSockets {
		return fmt.Errorf("look-up sockets: more than %d", MaxLookupSockets)
	}
	c.mu.open[s] = struct{}{}
	return nil
}

func (c *Context) remove(s io.Closer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.open, s)
}

// Close closes what is still open, waits for answers on their way at most lookupLinger, and ends ZeroMQ if it was started.
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
	if c.mu.z != nil { // nobody changes it any more
		err = errors.Join(err, c.mu.z.Term())
	}
	return err
}
