//go:build !nozmq

package main

import (
	"errors"
	"sync/atomic"

	zmq "github.com/pebbe/zmq4"
)

// echoServer receives a message, does nothing, and sends a reply of a given size: what the round trip costs at
// least with zmq4 as it is.
type echoServer struct {
	path  string
	ctx   *zmq.Context
	reply atomic.Int32 // bytes
	done  chan error
}

func newEchoServer(path string) (*echoServer, error) {
	ctx, err := zmq.NewContext()
	if err != nil {
		return nil, err
	}
	s, err := ctx.NewSocket(zmq.REP)
	if err != nil {
		return nil, errors.Join(err, ctx.Term())
	}
	if err := errors.Join(s.SetLinger(0), s.Bind("ipc://"+path)); err != nil {
		return nil, errors.Join(err, s.Close(), ctx.Term())
	}
	e := &echoServer{path: path, ctx: ctx, done: make(chan error, 1)}
	e.reply.Store(4)
	go func() { e.done <- e.serve(s) }()
	return e, nil
}

// serve ends when the context does.
func (e *echoServer) serve(s *zmq.Socket) error {
	defer s.Close()
	var reply [echoMaxReply]byte
	for {
		_, err := s.RecvMessageBytes(0)
		if err == nil {
			_, err = s.SendBytes(reply[:e.reply.Load()], 0)
		}
		if zmq.AsErrno(err) == zmq.ETERM {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (e *echoServer) close() error {
	err := e.ctx.Term()
	return errors.Join(err, <-e.done)
}
