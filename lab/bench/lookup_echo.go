//go:build libzmq

package bench

import (
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"

	zmq "github.com/pebbe/zmq4"
	"github.com/spf13/cobra"
)

// withEcho is whether this build can compare look-ups with libzmq's.
const withEcho = true

const echoMaxReply = 64 // bytes

// echoServer receives a message and sends a reply of a given size: the least that a round trip with
// unmodified zmq4 costs.
type echoServer struct {
	ctx   *zmq.Context
	reply atomic.Int32 // bytes
	done  chan error
}

// lookupEchoCommands has the process that only bench lookup starts. Lines of its input are sizes of
// replies.
func lookupEchoCommands() []*cobra.Command {
	return []*cobra.Command{{
		Use: "echo PATH", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			e, err := newEchoServer(args[0])
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, e.close()) }()
			return serveParent(cmd.InOrStdin(), cmd.OutOrStdout(), e.setReply)
		},
	}}
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
	e := &echoServer{ctx: ctx, done: make(chan error, 1)}
	e.reply.Store(4)
	go func() { e.done <- e.serve(s) }()
	return e, nil
}

func (e *echoServer) setReply(size string) error {
	n, err := strconv.Atoi(size)
	if err != nil || n < 1 || n > echoMaxReply {
		return fmt.Errorf("a reply of %q bytes, allowed: 1 to %d", size, echoMaxReply)
	}
	e.reply.Store(int32(n))
	return nil
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
