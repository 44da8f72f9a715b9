// Package zmtp is a REQ socket of ZeroMQ, with as much of ZMTP 3.0 as mock engines, tests and
// measurements need to ask a look-up socket: https://rfc.zeromq.org/spec/23.
package zmtp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

const (
	defaultTimeout = time.Second           // of a question that is given none
	redialPause    = 10 * time.Millisecond // before a socket that nobody serves is tried again
	maxPath        = 107                   // bytes of a socket's path
	maxAnswer      = 1 << 20               // bytes of a frame

	more    = 1 // flags of a frame
	long    = 2
	command = 4
)

// hello is a greeting of ZMTP 3 without security, and READY.
var hello = func() []byte {
	var b [greetingBytes]byte
	b[0], b[8], b[9], b[10] = 0xff, 1, 0x7f, 3
	copy(b[12:], "NULL")
	return append(b[:], "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"...)
}()

const (
	greetingBytes = 64
	pingHead      = 5 + 2 // name and time to live, which is not sent back
)

// Errors to branch on.
var (
	ErrTimeout = errors.New("no answer in time")
	ErrClosed  = errors.New("closed")
)

// Socket asks the server at a path, one question at a time. Several goroutines may use it, and then
// wait for each other. A question that is not answered in time fails with ErrTimeout, and the next
// one uses a new connection, so that no late answer is taken for it.
type Socket struct {
	path string
	mu   struct {
		sync.Mutex
		nc          net.Conn // nil: to be connected
		in          *bufio.Reader
		out, answer []byte
		closed      bool
	}
}

// Dial returns a socket that connects at the first question.
func Dial(path string) *Socket { return &Socket{path: path} }

// Close waits for a question that is being asked.
func (s *Socket) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.closed = true
	s.disconnectLocked()
}

// Exchange sends a message of some frames, and returns the one frame that answers it, in memory
// that the next answer reuses. A timeout of 0 is a second.
func (s *Socket) Exchange(frames [][]byte, timeout time.Duration) (answer []byte, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	deadline := time.Now().Add(timeout)
	for {
		if s.mu.closed {
			return nil, ErrClosed
		}
		used := s.mu.nc != nil
		if answer, err = s.askLocked(frames, deadline); err == nil {
			return answer, nil
		}
		s.disconnectLocked()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil, fmt.Errorf("look-up %s: %w", s.path, ErrTimeout)
		case !used: // else the server may have ended the connection since the last question
			return nil, fmt.Errorf("look-up %s: %w", s.path, err)
		}
	}
}

func (s *Socket) askLocked(frames [][]byte, deadline time.Time) ([]byte, error) {
	if err := s.connectLocked(deadline); err != nil {
		return nil, err
	}
	if err := s.mu.nc.SetDeadline(deadline); err != nil {
		return nil, err
	}
	out := append(s.mu.out[:0], more, 0) // REQ's empty frame
	for i, body := range frames {
		flags := byte(more)
		if i == len(frames)-1 {
			flags = 0
		}
		if len(body) > 0xff {
			out = binary.BigEndian.AppendUint64(append(out, flags|long), uint64(len(body)))
		} else {
			out = append(out, flags, byte(len(body)))
		}
		out = append(out, body...)
	}
	s.mu.out = out
	if _, err := s.mu.nc.Write(out); err != nil {
		return nil, err
	}
	if empty, last, err := s.frameLocked(); err != nil || len(empty) > 0 || last {
		return nil, errors.Join(err, errors.New("no empty frame began the answer"))
	}
	answer, last, err := s.frameLocked()
	if err == nil && !last {
		err = errors.New("more than one frame came in answer")
	}
	return answer, err
}

// frameLocked reads a frame, and answers commands before it.
func (s *Socket) frameLocked() (body []byte, last bool, err error) {
	for {
		var flags, short byte
		if flags, err = s.mu.in.ReadByte(); err != nil {
			return nil, false, err
		}
		size := uint64(0)
		if flags&long != 0 {
			err = binary.Read(s.mu.in, binary.BigEndian, &size)
		} else if short, err = s.mu.in.ReadByte(); err == nil {
			size = uint64(short)
		}
		if err == nil && size > maxAnswer {
			err = fmt.Errorf("a frame of %d bytes", size)
		}
		if err != nil {
			return nil, false, err
		}
		if uint64(cap(s.mu.answer)) < size {
			s.mu.answer = make([]byte, size)
		}
		body = s.mu.answer[:size]
		if _, err = io.ReadFull(s.mu.in, body); err != nil || flags&command == 0 {
			return body, flags&more == 0, err
		}
		if len(body) >= pingHead && string(body[:5]) == "\x04PING" {
			pong := append([]byte{command, byte(len(body) - 2)}, "\x04PONG"...)
			if _, err = s.mu.nc.Write(append(pong, body[pingHead:]...)); err != nil {
				return nil, false, err
			}
		}
	}
}

// connectLocked connects if needed. It waits for a socket that nobody serves yet.
func (s *Socket) connectLocked(deadline time.Time) (err error) {
	if s.mu.nc != nil {
		return nil
	}
	if len(s.path) > maxPath {
		return fmt.Errorf("path: %d bytes, allowed is 1 to %d", len(s.path), maxPath)
	}
	for dialer := (net.Dialer{Deadline: deadline}); ; time.Sleep(redialPause) {
		if s.mu.nc, err = dialer.Dial("unix", s.path); err == nil {
			break
		}
		if time.Until(deadline) < redialPause {
			return fmt.Errorf("%w: %w", ErrTimeout, err)
		}
	}
	s.mu.in = bufio.NewReader(s.mu.nc)
	if err := s.mu.nc.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := s.mu.nc.Write(hello); err != nil {
		return err
	}
	_, err = s.mu.in.Discard(greetingBytes)
	return err
}

func (s *Socket) disconnectLocked() {
	if s.mu.nc != nil {
		_ = s.mu.nc.Close() // nothing was written that is not answered
		s.mu.nc = nil
	}
}
