//go:build nozmq

package ipc

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"time"
)

// With the build tag nozmq nothing of libzmq is in the program: it needs no library but C's. Its REQ sockets are these.

// zmqLibrary is libzmq's context, which is never there.
type zmqLibrary struct{}

func startZMQ() (*zmqLibrary, error) {
	return nil, errors.New("zmq: this program is built without it (build tag nozmq)")
}

// Term is never called.
func (*zmqLibrary) Term() error { return nil }

func checkLayout() error { return nil }

var zmtpReadyREQ = readyCommand("REQ")

// reqSocket is a REQ socket that speaks ZMTP by itself, of one goroutine at a time.
type reqSocket struct {
	nc  net.Conn
	in  zmtpReader
	out []byte
}

func dialREQ(_ *Context, path string) (*reqSocket, error) {
	nc, err := net.DialTimeout("unix", path, DefaultAskTimeout)
	if err != nil {
		return nil, err
	}
	s := &reqSocket{nc: nc}
	s.in = zmtpReader{src: nc, buf: make([]byte, zmtpBuffer), grow: func() error { return nil }, command: s.command}
	_ = nc.SetDeadline(time.Now().Add(DefaultAskTimeout))
	if err := s.greet(); err != nil {
		nc.Close()
		return nil, err
	}
	return s, nil
}

// greet is ZMTP's handshake: both sides send a greeting, then READY.
func (s *reqSocket) greet() error {
	if _, err := s.nc.Write(append(zmtpGreeting[:], zmtpReadyREQ...)); err != nil {
		return err
	}
	if err := s.in.fill(greetingBytes); err != nil {
		return err
	}
	if err := checkGreeting(s.in.buf[s.in.r : s.in.r+greetingBytes]); err != nil {
		return err
	}
	s.in.r += greetingBytes
	flags, size, err := s.in.head()
	if err == nil && (flags&zmtpCommand == 0 || size > maxZMTPCommand) {
		err = fmt.Errorf("flags %#x, %d bytes instead of READY: %w", flags, size, errZMTP)
	}
	if err == nil {
		err = s.in.fill(int(size))
	}
	if err == nil {
		s.in.r += int(size) // a server's type is not asked for
	}
	return err
}

// command answers a PING. Other commands mean nothing here.
func (s *reqSocket) command(body []byte) error {
	if answer := pong(body); answer != nil {
		_, err := s.nc.Write(answer)
		return err
	}
	return nil
}

// exchange sends a message and waits for the answer, which is in memory that the next exchange uses again.
func (s *reqSocket) exchange(f *Frames, timeout time.Duration) (Frames, error) {
	_ = s.nc.SetDeadline(time.Now().Add(timeout)) // of a closed connection nothing is read
	s.out = append(s.out[:0], zmtpMore, 0)
	for i := range f.Len() {
		s.out = appendFrame(s.out, f.At(i), i+1 < f.Len())
	}
	_, err := s.nc.Write(s.out)
	if err == nil {
		err = s.in.next()
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return Frames{}, ErrTimeout
	case errors.Is(err, io.EOF):
		return Frames{}, io.ErrUnexpectedEOF
	case err != nil:
		return Frames{}, err
	case s.in.over || s.in.message.Len() < delimiterFrames || len(s.in.message.At(0)) != 0:
		return Frames{}, fmt.Errorf("an answer of %d frames, %d bytes: %w", s.in.frames, s.in.bytes, errZMTP)
	}
	return s.in.message.From(delimiterFrames), nil
}

func appendFrame(b, body []byte, more bool) []byte {
	flags := byte(0)
	if more {
		flags = zmtpMore
	}
	if len(body) <= math.MaxUint8 {
		b = append(b, flags, byte(len(body)))
	} else {
		b = binary.BigEndian.AppendUint64(append(b, flags|zmtpLong), uint64(len(body)))
	}
	return append(b, body...)
}

func (s *reqSocket) close() { s.nc.Close() }
