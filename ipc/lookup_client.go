package ipc

import (
	"fmt"
	"sync"
	"time"
)

// DefaultAskTimeout is what Ask waits if it is not told.
const DefaultAskTimeout = time.Second

// LookupClient asks a look-up socket, one question at a time. It may be used from several goroutines, which then
// wait for each other. It never hangs: what is not answered in time is ErrTimeout, and the next question goes
// over a new socket, so that no late answer is taken for it.
type LookupClient struct {
	path string
	own  bool // the context is this client's
	mu   struct {
		sync.Mutex
		ctx    *Context
		soc    *reqSocket // nil: to be made
		frames Frames
		closed bool
	}
}

// DialLookup makes a client of the look-up socket at path with a ZeroMQ context of its own. It connects at the first
// question.
func DialLookup(path string) *LookupClient { return &LookupClient{path: path, own: true} }

// DialLookup makes a client of the look-up socket at path in this context.
func (c *Context) DialLookup(path string) *LookupClient {
	l := &LookupClient{path: path}
	l.mu.ctx = c
	return l
}

// Ask asks in the own form, whatever r.Form says. A timeout of 0 is DefaultAskTimeout; it is rounded up to
// milliseconds.
func (l *LookupClient) Ask(r *LookupRequest, timeout time.Duration) (LookupReply, error) {
	own := *r
	own.Form = FormOwn
	return l.AskForm(&own, timeout)
}

// AskForm asks in the form of r.
func (l *LookupClient) AskForm(r *LookupRequest, timeout time.Duration) (LookupReply, error) {
	if timeout <= 0 {
		timeout = DefaultAskTimeout
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.frames.Reset()
	if err := AppendRequest(&l.mu.frames, r); err != nil {
		return LookupReply{}, err
	}
	answer, err := l.exchangeLocked(timeout)
	if err != nil {
		l.disconnectLocked()
		return LookupReply{}, fmt.Errorf("look-up %s: %w", l.path, err)
	}
	a, _, err := DecodeReply(r.Form, answer)
	return a, err
}

// Exchange sends frames as they are and returns a copy of the one frame that answers.
func (l *LookupClient) Exchange(frames *Frames, timeout time.Duration) ([]byte, error) {
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

// exchangeLocked sends mu.frames and gives the answer in the socket's memory.
func (l *LookupClient) exchangeLocked(timeout time.Duration) ([]byte, error) {
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

func (l *LookupClient) connectLocked() (err error) {
	if l.mu.closed {
		return ErrClosed
	}
	if l.mu.soc != nil {
		return nil
	}
	if len(l.path) > MaxSocketPath {
		return fmt.Errorf("path: %d bytes, allowed is 1 to %d", len(l.path), MaxSocketPath)
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

func (l *LookupClient) disconnectLocked() {
	if l.mu.soc != nil {
		l.mu.soc.close()
		l.mu.soc = nil
	}
	if l.mu.ctx != nil {
		l.mu.ctx.remove(l)
	}
}

// Close waits for a question that is being asked.
func (l *LookupClient) Close() error {
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
