package zmqclient

/*
#cgo pkg-config: libzmq
#include "zmq_io.h"
*/
import "C"

import (
	"errors"
	"reflect"
	"syscall"
	"time"
	"unsafe"

	zmq "github.com/pebbe/zmq4"

	"github.com/kvagent/kvagent/ipc"
)

// zmq4 takes six calls into C and three allocations per frame. Here a whole message is one call and
// is received into reused memory: a look-up of one frame per hash costs half, one of a single frame
// allocates nothing.

// rawSocket returns libzmq's socket inside of zmq4's: the first field, which checkLayout verifies.
func rawSocket(s *zmq.Socket) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(s)) }

// checkLayout fails if zmq4's layout differs from what rawSocket expects.
func checkLayout() error {
	f := reflect.TypeFor[zmq.Socket]().Field(0)
	if f.Name != "soc" || f.Type.Kind() != reflect.UnsafePointer || f.Offset != 0 {
		return errors.New("zmq4: its Socket does not begin with libzmq's socket: this version is not fit")
	}
	return nil
}

// receiver holds the memory of received messages. It belongs to the goroutine that owns the socket.
type receiver struct{ rx C.kv_rx }

// receive waits for a message until the timeout (ipc.ErrTimeout); a negative one is no limit.
// Frames beyond the limits of a look-up are read and discarded.
func (r *receiver) receive(s *zmq.Socket, timeout time.Duration) error {
	ms := C.long(-1)
	if timeout >= 0 {
		ms = C.long((timeout + time.Millisecond - 1) / time.Millisecond)
	}
	switch rc := C.kv_receive(rawSocket(s), ms, ipc.MaxLookupBytes, ipc.MaxLookupFrames, &r.rx); rc {
	case C.KV_OK:
		return nil
	case C.KV_TIMEOUT:
		return ipc.ErrTimeout
	default:
		return zmqError(int(-rc))
	}
}

// frames returns the message received last, in memory that the next receive reuses; of one that is
// too large, its beginning.
func (r *receiver) frames() ipc.Frames {
	return ipc.Frames{Buf: unsafe.Slice((*byte)(unsafe.Pointer(r.rx.buf)), int(r.rx.len)),
		Ends: unsafe.Slice((*int32)(unsafe.Pointer(r.rx.ends)), int(r.rx.kept))}
}

func (r *receiver) free() { C.kv_free(&r.rx) }

// sendFrames sends a message without waiting.
func sendFrames(s *zmq.Socket, f *ipc.Frames) error {
	rc := C.kv_send(rawSocket(s), (*C.char)(unsafe.Pointer(unsafe.SliceData(f.Buf))),
		(*C.int32_t)(unsafe.Pointer(unsafe.SliceData(f.Ends))), C.int(f.Len()))
	if rc != 0 {
		return zmqError(int(-rc))
	}
	return nil
}

func zmqError(errno int) error { return zmq.Errno(syscall.Errno(errno)) }

// reqSocket is a REQ socket of libzmq, of one goroutine at a time. It connects in the background
// and retries.
type reqSocket struct {
	soc *zmq.Socket
	rx  receiver
}

func dialREQ(c *Context, path string) (*reqSocket, error) {
	s, err := c.z.NewSocket(zmq.REQ)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(s.SetLinger(0), s.SetMaxmsgsize(ipc.MaxLookupBytes), s.Connect("ipc://"+path)); err != nil {
		s.Close()
		return nil, err
	}
	return &reqSocket{soc: s}, nil
}

// exchange sends a message and waits for the answer, which is in memory that the next exchange
// reuses.
func (s *reqSocket) exchange(f *ipc.Frames, timeout time.Duration) (ipc.Frames, error) {
	if err := sendFrames(s.soc, f); err != nil {
		return ipc.Frames{}, err
	}
	if err := s.rx.receive(s.soc, timeout); err != nil {
		return ipc.Frames{}, err
	}
	return s.rx.frames(), nil
}

func (s *reqSocket) close() {
	s.soc.Close()
	s.rx.free()
}
