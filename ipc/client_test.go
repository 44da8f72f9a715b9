package ipc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

// DefaultAskTimeout is the limit of Ask if it is given none.
const DefaultAskTimeout = time.Second

// redialPause is the pause before a socket that nobody serves is tried again.
const redialPause = 10 * time.Millisecond

// LookupClient asks a look-up socket, one question at a time, as a REQ socket of ZeroMQ does. It is
// for mock engines, tests and measurements. Several goroutines may use it, and then wait for each
// other. A question that is not answered in time fails with ErrTimeout, and the next one uses a new
// connection, so that no late answer is taken for it.
type LookupClient struct {
	path string
	mu   struct {
		sync.Mutex
		nc     net.Conn // nil: to be connected
		in     zmtpReader
		out    []byte
		frames Frames
		closed bool
	}
}

// DialLookup returns a client of the look-up socket at path. It connects at the first question.
func DialLookup(path string) *LookupClient { return &LookupClient{path: path} }

// Ask asks in the own form, whatever r.Form is. A timeout of 0 is DefaultAskTimeout.
func (l *LookupClient) Ask(r *LookupRequest, timeout time.Duration) (LookupReply, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.frames.Reset()
	if err := AppendRequest(&l.mu.frames, r); err != nil {
		return LookupReply{}, err
	}
	answer, err := l.exchangeLocked(&l.mu.frames, timeout)
	if err != nil {
		return LookupReply{}, err
	}
	return DecodeReply(answer)
}

// Exchange sends frames unchanged and returns a copy of the one frame that answers.
func (l *LookupClient) Exchange(frames *Frames, timeout time.Duration) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	answer, err := l.exchangeLocked(frames, timeout)
	return append([]byte(nil), answer...), err
}

// exchangeLocked sends a message and returns the answer in memory that the next one reuses. A
// connection that the server ended since the last question is replaced.
func (l *LookupClient) exchangeLocked(frames *Frames, timeout time.Duration) (answer []byte, err error) {
	if timeout <= 0 {
		timeout = DefaultAskTimeout
	}
	deadline := time.Now().Add(timeout)
	for {
		if l.mu.closed {
			return nil, ErrClosed
		}
		used := l.mu.nc != nil
		if answer, err = l.askLocked(frames, deadline); err == nil {
			return answer, nil
		}
		l.disconnectLocked()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, fmt.Errorf("look-up %s: %w", l.path, ErrTimeout)
		case !used:
			return nil, fmt.Errorf("look-up %s: %w", l.path, err)
		}
	}
}

func (l *LookupClient) askLocked(frames *Frames, deadline time.Time) ([]byte, error) {
	if err := l.connectLocked(deadline); err != nil {
		return nil, err
	}
	if err := l.mu.nc.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if _, err := l.mu.nc.Write(l.envelopeLocked(frames)); err != nil {
		return nil, err
	}
	if err := l.mu.in.next(); err != nil {
		return nil, err
	}
	m := &l.mu.in.message
	if m.Len() != 1 || !l.mu.in.enveloped {
		return nil, fmt.Errorf("%d frames came in answer, allowed is 1 after an empty one", m.Len())
	}
	return m.At(0), nil
}

// envelopeLocked returns a message as REQ sends it: after an empty frame.
func (l *LookupClient) envelopeLocked(frames *Frames) []byte {
	out := append(l.mu.out[:0], zmtpMore, 0)
	for i := range frames.Len() {
		var flags byte
		if i < frames.Len()-1 {
			flags = zmtpMore
		}
		body := frames.At(i)
		if len(body) > 0xff {
			out = append(out, flags|zmtpLong)
			out = binary.BigEndian.AppendUint64(out, uint64(len(body)))
		} else {
			out = append(out, flags, byte(len(body)))
		}
		out = append(out, body...)
	}
	l.mu.out = out
	return out
}

// connectLocked connects if needed. It waits for a socket that nobody serves yet.
func (l *LookupClient) connectLocked(deadline time.Time) (err error) {
	if l.mu.nc != nil {
		return nil
	}
	if len(l.path) > MaxSocketPath {
		return fmt.Errorf("path: %d bytes, allowed is 1 to %d", len(l.path), MaxSocketPath)
	}
	for dialer := (net.Dialer{Deadline: deadline}); ; {
		if l.mu.nc, err = dialer.Dial("unix", l.path); err == nil {
			break
		}
		if time.Until(deadline) < redialPause {
			return fmt.Errorf("%w: %w", ErrTimeout, err)
		}
		time.Sleep(redialPause)
	}
	l.mu.in = zmtpReader{src: l.mu.nc, buf: make([]byte, zmtpBuffer), grow: func() error { return nil }}
	if err := l.mu.nc.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := l.mu.nc.Write(append(zmtpGreeting[:], readyCommand("REQ")...)); err != nil {
		return err
	}
	in := &l.mu.in
	if err := in.fill(greetingBytes); err != nil {
		return err
	}
	in.r += greetingBytes
	if err := checkGreeting(in.buf[in.r-greetingBytes : in.r]); err != nil {
		return err
	}
	_, size, err := in.head() // of READY
	if err == nil {
		err = in.fill(int(size))
		in.r += int(size)
	}
	return err
}

func (l *LookupClient) disconnectLocked() {
	if l.mu.nc != nil {
		_ = l.mu.nc.Close() // nothing was written that is not answered
		l.mu.nc = nil
	}
}

// Close waits for a question that is being asked.
func (l *LookupClient) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.closed = true
	l.disconnectLocked()
	return nil
}

// DialSession connects to the agent at path and performs the handshake. The error wraps an *Error
// if the agent refused.
func DialSession(ctx context.Context, path, software string) (*Conn, *Welcome, error) {
	if len(path) > MaxSocketPath {
		return nil, nil, fmt.Errorf("session socket %s: %d bytes, allowed is 1 to %d", path, len(path), MaxSocketPath)
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, nil, fmt.Errorf("session: %w", err)
	}
	c, err := NewConn(nc.(*net.UnixConn), false)
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.uc.Close() })
	w, err := c.hello(software)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		c.Close()
		return nil, nil, fmt.Errorf("session %s: %w", path, errors.Join(ctx.Err(), err))
	}
	return c, w, nil
}

func (c *Conn) hello(software string) (*Welcome, error) {
	sent := c.Send(&Hello{MinVersion: Version, MaxVersion: Version, Software: software})
	var malformed *MalformedError
	if errors.As(sent, &malformed) {
		return nil, sent
	}
	// An agent that refuses at once closes before our HELLO; its ERROR can still be read.
	msg, _, err := c.receive(HandshakeTimeout)
	if err != nil {
		return nil, errors.Join(sent, err)
	}
	switch m := msg.(type) {
	case *Error:
		return nil, m
	case *Welcome:
		return m, sent
	}
	return nil, fmt.Errorf("%T came instead of WELCOME", msg)
}
