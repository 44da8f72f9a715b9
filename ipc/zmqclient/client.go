// Package zmqclient asks look-up sockets through libzmq, as engines do: for mock engines, tests and
// measurements. The agent itself needs no libzmq.
package zmqclient

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"

	"github.com/kvagent/kvagent/ipc"
)

// DefaultAskTimeout is the limit of Ask if it is given none.
const DefaultAskTimeout = time.Second

// Context is a libzmq context with its clients. Its methods may be called from any goroutine.
type Context struct {
	z  *zmq.Context
	mu struct {
		sync.Mutex
		open   map[*Client]struct{}
		closed bool
	}
}

// NewContext starts libzmq.
func NewContext() (*Context, error) {
	if err := checkLayout(); err != nil {
		return nil, err
	}
	z, err := zmq.NewContext()
	if err != nil {
		return nil, fmt.Errorf("zmq: %w", err)
	}
	c := &Context{z: z}
	c.mu.open = map[*Client]struct{}{}
	return c, nil
}

// add registers a client.
func (c *Context) add(l *Client) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return fmt.Errorf("look-up context: %w", ipc.ErrClosed)
	}
	c.mu.open[l] = struct{}{}
	return nil
}

func (c *Context) remove(l *Client) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.mu.open, l)
}

// Close closes all clients, and ends libzmq.
func (c *Context) Close() error {
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		return nil
	}
	c.mu.closed = true
	left := slices.Collect(maps.Keys(c.mu.open))
	c.mu.Unlock()
	var err error
	for _, l := range left {
		err = errors.Join(err, l.Close())
	}
	return errors.Join(err, c.z.Term())
}

// Client asks a look-up socket, one question at a time. Several goroutines may use it, and then
// wait for each other. It never hangs: a question that is not answered in time fails with
// ErrTimeout, and the next one uses a new socket, so that no late answer is taken for it.
type Client struct {
	path string
	own  bool // the context is this client's
	mu   struct {
		sync.Mutex
		ctx    *Context
		soc    *reqSocket // nil: to be created
		frames ipc.Frames
		closed bool
	}
}

// Dial returns a client of the look-up socket at path with a context of its own. It connects at the
// first question.
func Dial(path string) *Client { return &Client{path: path, own: true} }

// Dial returns a client of the look-up socket at path in this context.
func (c *Context) Dial(path string) *Client {
	l := &Client{path: path}
	l.mu.ctx = c
	return l
}

// Ask asks in the own form, whatever r.Form is. A timeout of 0 is DefaultAskTimeout; it is rounded
// up to milliseconds.
func (l *Client) Ask(r *ipc.LookupRequest, timeout time.Duration) (ipc.LookupReply, error) {
	own := *r
	own.Form = ipc.FormOwn
	return l.AskForm(&own, timeout)
}

// AskForm asks in the form of r.
func (l *Client) AskForm(r *ipc.LookupRequest, timeout time.Duration) (ipc.LookupReply, error) {
	if timeout <= 0 {
		timeout = DefaultAskTimeout
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.frames.Reset()
	if err := ipc.AppendRequest(&l.mu.frames, r); err != nil {
		return ipc.LookupReply{}, err
	}
	answer, err := l.exchangeLocked(timeout)
	if err != nil {
		l.disconnectLocked()
		return ipc.LookupReply{}, fmt.Errorf("look-up %s: %w", l.path, err)
	}
	a, _, err := ipc.DecodeReply(r.Form, answer)
	return a, err
}

// Exchange sends frames unchanged and returns a copy of the one frame that answers.
func (l *Client) Exchange(frames *ipc.Frames, timeout time.Duration) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.frames.Reset()
	for i := range frames.Len() {
		l.mu.frames.Add(frames.At(i))
	}
	answer, err := l.exchangeLocked(timeout)
	if err != nil {
		l.disconnectLocked()
		return nil, fmt.Errorf("look-up %s: %w", l.path, err)
	}
	return append([]byte(nil), answer...), nil
}

// exchangeLocked sends mu.frames and returns the answer in the socket's memory.
func (l *Client) exchangeLocked(timeout time.Duration) ([]byte, error) {
	if err := l.connectLocked(); err != nil {
		return nil, err
	}
	f, err := l.mu.soc.exchange(&l.mu.frames, timeout)
	if err != nil {
		return nil, err
	}
	if f.Len() != 1 {
		return nil, fmt.Errorf("%d frames came in answer, allowed is 1", f.Len())
	}
	return f.At(0), nil
}

func (l *Client) connectLocked() (err error) {
	if l.mu.closed {
		return ipc.ErrClosed
	}
	if l.mu.soc != nil {
		return nil
	}
	if len(l.path) > ipc.MaxSocketPath {
		return fmt.Errorf("path: %d bytes, allowed is 1 to %d", len(l.path), ipc.MaxSocketPath)
	}
	if l.mu.ctx == nil {
		if l.mu.ctx, err = NewContext(); err != nil {
			return err
		}
	}
	if err = l.mu.ctx.add(l); err != nil {
		return err
	}
	l.mu.soc, err = dialREQ(l.mu.ctx, l.path)
	return err
}

func (l *Client) disconnectLocked() {
	if l.mu.soc != nil {
		l.mu.soc.close()
		l.mu.soc = nil
	}
	if l.mu.ctx != nil {
		l.mu.ctx.remove(l)
	}
}

// Close waits for a question that is being asked.
func (l *Client) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.closed {
		return nil
	}
	l.mu.closed = true
	l.disconnectLocked()
	if l.own && l.mu.ctx != nil {
		return l.mu.ctx.Close()
	}
	return nil
}
