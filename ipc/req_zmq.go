//go:build !nozmq

package ipc

import (
	"errors"
	"fmt"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// zmqLibrary is libzmq's context.
type zmqLibrary = zmq.Context

func startZMQ() (*zmqLibrary, error) {
	z, err := zmq.NewContext()
	if err != nil {
		return nil, fmt.Errorf("zmq: %w", err)
	}
	return z, nil
}

// reqSocket is a REQ socket of libzmq, of one goroutine at a time. It connects in the background, again and again.
type reqSocket struct {
	soc *zmq.Socket
	rx  receiver
}

func dialREQ(c *Context, path string) (*reqSocket, error) {
	z, err := c.zmq()
	if err != nil {
		return nil, err
	}
	s, err := z.NewSocket(zmq.REQ)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(s.SetLinger(0), s.SetMaxmsgsize(MaxLookupBytes), s.Connect("ipc://"+path)); err != nil {
		s.Close()
		return nil, err
	}
	return &reqSocket{soc: s}, nil
}

// exchange sends a message and waits for the answer, which is in memory that the next exchange uses again.
func (s *reqSocket) exchange(f *Frames, timeout time.Duration) (Frames, error) {
	if err := sendFrames(s.soc, f); err != nil {
		return Frames{}, err
	}
	if err := s.rx.receive(s.soc, timeout); err != nil {
		return Frames{}, err
	}
	return s.rx.frames(), nil
}

func (s *reqSocket) close() {
	s.soc.Close()
	s.rx.free()
}
