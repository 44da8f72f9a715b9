package ipc

import (
	"errors"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// testZMQ is libzmq itself, which the tests' clients are made of. Its sockets are closed before the
// test ends.
func testZMQ(t testing.TB) *zmq.Context {
	t.Helper()
	z, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := z.Term(); err != nil {
			t.Error(err)
		}
	})
	return z
}

// testClient is a plain REQ socket of libzmq. One that timed out is closed, and the next question
// goes over a new one.
type testClient struct {
	z    *zmq.Context
	path string
	soc  *zmq.Socket // nil: to be made
}

func dialLookup(t testing.TB, path string) *testClient {
	t.Helper()
	return &testClient{z: testZMQ(t), path: path}
}

// Ask asks in the own form; a timeout of 0 is testTimeout.
func (l *testClient) Ask(r *LookupRequest, timeout time.Duration) (LookupReply, error) {
	own := *r
	own.Form = FormOwn
	var f Frames
	if err := appendRequest(&f, &own); err != nil {
		return LookupReply{}, err
	}
	answer, err := l.Exchange(&f, timeout)
	if err != nil {
		return LookupReply{}, err
	}
	a, err := decodeReply(own.Form, answer)
	return a, err
}

// Exchange sends frames as they are and gives the one frame that answers.
func (l *testClient) Exchange(f *Frames, timeout time.Duration) (answer []byte, err error) {
	if timeout == 0 {
		timeout = testTimeout
	}
	defer func() {
		if err != nil {
			l.Close()
		}
	}()
	if l.soc == nil {
		if l.soc, err = l.z.NewSocket(zmq.REQ); err != nil {
			return nil, err
		}
		if err = errors.Join(l.soc.SetLinger(0), l.soc.Connect("ipc://"+l.path)); err != nil {
			return nil, err
		}
	}
	if err = l.soc.SetRcvtimeo(timeout); err != nil {
		return nil, err
	}
	message := make([][]byte, f.Len())
	for i := range message {
		message[i] = f.At(i)
	}
	if _, err = l.soc.SendMessage(message); err != nil {
		return nil, err
	}
	answer, err = l.soc.RecvBytes(0)
	if zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) {
		err = ErrTimeout
	}
	return answer, err
}

func (l *testClient) Close() {
	if l.soc != nil {
		_ = l.soc.Close() // of a socket that is open
		l.soc = nil
	}
}
