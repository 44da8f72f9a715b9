package mockengine

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/kvagent/kvagent/ipc"
)

// DialSession connects to the agent's session socket and says HELLO. The error wraps an *ipc.Error
// if the agent refused.
func DialSession(ctx context.Context, path, software string) (*ipc.Conn, *ipc.Welcome, error) {
	nc, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, nil, fmt.Errorf("session: %w", err)
	}
	c, err := ipc.NewConn(nc.(*net.UnixConn), false)
	if err != nil {
		return nil, nil, err
	}
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	sent := c.Send(&ipc.Hello{MinVersion: ipc.Version, MaxVersion: ipc.Version, Software: software})
	m, _, err := c.Recv() // also the ERROR of an agent that refuses before it reads
	switch m := m.(type) {
	case *ipc.Welcome:
		return c, m, nil
	case *ipc.Error:
		err = m
	}
	return nil, nil, fmt.Errorf("session %s: %w", path, errors.Join(ctx.Err(), sent, err, c.Close()))
}

const (
	askTimeout  = time.Second           // of Ask, if it is given none
	redialPause = 10 * time.Millisecond // before a socket that nobody serves is tried again
	zmtpMore    = 1                     // flags of a frame
	zmtpLong    = 2

	greetingBytes = 64
)

// zmtpHello is the greeting of ZMTP 3 with the mechanism NULL, and the READY of a REQ socket.
var zmtpHello = "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + string(make([]byte, 48)) +
	"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"

// LookupClient asks a look-up socket, one question at a time, as a REQ socket of ZeroMQ does.
// Several goroutines may use it, and then wait for each other. After an error the next question
// uses a new connection, so that no late answer is taken for its own.
type LookupClient struct {
	path string
	mu   sync.Mutex
	nc   net.Conn // nil: to be connected
	in   *bufio.Reader
	out  []byte // what was sent last; its memory is used again
}

// DialLookup returns a client of the look-up socket at path. It connects at the first question.
func DialLookup(path string) *LookupClient { return &LookupClient{path: path} }

// Ask asks in the own form, whatever r.Form is. A timeout of 0 is askTimeout.
func (l *LookupClient) Ask(r *ipc.LookupRequest, timeout time.Duration) (ipc.LookupReply, error) {
	var frames ipc.Frames
	if err := ipc.AppendRequest(&frames, r); err != nil {
		return ipc.LookupReply{}, err
	}
	answer, err := l.Exchange(&frames, timeout)
	if err != nil {
		return ipc.LookupReply{}, err
	}
	return ipc.DecodeReply(answer)
}

// Exchange sends frames unchanged and returns the one frame that answers. A connection that the
// server ended since the last question is replaced.
func (l *LookupClient) Exchange(frames *ipc.Frames, timeout time.Duration) (answer []byte, err error) {
	if timeout <= 0 {
		timeout = askTimeout
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	used, deadline := l.nc != nil, time.Now().Add(timeout)
	answer, err = l.exchangeLocked(frames, deadline)
	if used && err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		answer, err = l.exchangeLocked(frames, deadline)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = ipc.ErrTimeout
	}
	return answer, err
}

func (l *LookupClient) exchangeLocked(frames *ipc.Frames, deadline time.Time) (answer []byte, err error) {
	out, fresh := l.out[:0], l.nc == nil
	if fresh {
		if l.nc, err = redial(l.path, deadline); err != nil {
			return nil, err
		}
		l.in, out = bufio.NewReader(l.nc), append(out, zmtpHello...)
	}
	defer func() {
		if err != nil {
			_ = l.nc.Close() // nothing was written that is to be answered
			l.nc = nil
		}
	}()
	out = append(out, zmtpMore, 0)
	for i := range frames.Len() {
		flags := byte(zmtpLong)
		if i < frames.Len()-1 {
			flags |= zmtpMore
		}
		out = binary.BigEndian.AppendUint64(append(out, flags), uint64(len(frames.At(i))))
		out = append(out, frames.At(i)...)
	}
	l.out = out
	if err := l.nc.SetDeadline(deadline); err != nil {
		return nil, err
	}
	if _, err := l.nc.Write(out); err != nil {
		return nil, err
	}
	if fresh {
		if _, err := l.in.Discard(greetingBytes); err != nil {
			return nil, err
		}
	}
	return l.answerLocked()
}

// answerLocked reads the last frame of a message. All frames of the server are short.
func (l *LookupClient) answerLocked() ([]byte, error) {
	for {
		var head [2]byte // flags, length
		if _, err := io.ReadFull(l.in, head[:]); err != nil {
			return nil, err
		}
		body := make([]byte, head[1])
		if _, err := io.ReadFull(l.in, body); err != nil || head[0] == 0 {
			return body, err
		}
	}
}

// redial connects, and waits for a socket that nobody serves yet.
func redial(path string, deadline time.Time) (net.Conn, error) {
	for dialer := (net.Dialer{Deadline: deadline}); ; {
		nc, err := dialer.Dial("unix", path)
		if err == nil {
			return nc, nil
		}
		if time.Until(deadline) < redialPause {
			return nil, fmt.Errorf("look-up %s: %w: %w", path, ipc.ErrTimeout, err)
		}
		time.Sleep(redialPause)
	}
}

// Close waits for a question that is being asked.
func (l *LookupClient) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.nc == nil {
		return nil
	}
	return l.nc.Close()
}
