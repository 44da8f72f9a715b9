//go:build !nozmq

package ipc

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
)

// zmq4 takes six calls into C and three allocations per frame. Here a whole message is one call and lands in
// memory that is used again: a look-up of one frame per hash costs half, one of a single frame allocates nothing.

// rawSocket is libzmq's socket in zmq4's: the first field, as checkLayout proves.
func rawSocket(s *zmq.Socket) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(s)) }

// checkLayout fails if zmq4 was changed under rawSocket.
func checkLayout() error {
	f := reflect.TypeFor[zmq.Socket]().Field(0)
	if f.Name != "soc" || f.Type.Kind() != reflect.UnsafePointer || f.Offset != 0 {
		return errors.New("zmq4: its Socket does not begin with libzmq's socket: this version is not fit")
	}
	return nil
}

// receiver is the memory of received messages. It belongs to the goroutine that owns the socket.
type receiver struct{ rx C.kv_rx }

// receive waits for a message until the timeout is over (ErrTimeout), which is negative for ever. What is beyond the
// limits of a look-up is read and dropped.
func (r *receiver) receive(s *zmq.Socket, timeout time.Duration) error {
	ms := C.long(-1)
	if timeout >= 0 {
		ms = C.long((timeout + time.Millisecond - 1) / time.Millisecond)
	}
	switch rc := C.kv_receive(rawSocket(s), ms, MaxLookupBytes, MaxLookupFrames, &r.rx); rc {
	case C.KV_OK:
		return nil
	case C.KV_TIMEOUT:
		return ErrTimeout
	default:
		return zmqError(int(-rc))
	}
}

// frames is the message received last, in memory that the next receive uses again. Of one that is too large it
// is the beginning.
func (r *receiver) frames() Frames {
	return Frames{Buf: unsafe.Slice((*byte)(unsafe.Pointer(r.rx.buf)), int(r.rx.len)),
		Ends: unsafe.Slice((*int32)(unsafe.Pointer(r.rx.ends)), int(r.rx.kept))}
}

// received is how many frames and bytes the message had, and whether it was too large.
func (r *receiver) received() (frames int, bytes int64, over bool) {
	return int(r.rx.frames), int64(r.rx.bytes), r.rx.over != 0
}

// trim gives memory back that a large message took.
func (r *receiver) trim() {
	if r.rx.cap > keepReceived {
		C.kv_free(&r.rx)
	}
}

func (r *receiver) free() { C.kv_free(&r.rx) }

// sendFrames sends a message without waiting.
func sendFrames(s *zmq.Socket, f *Frames) error {
	rc := C.kv_send(rawSocket(s), (*C.char)(unsafe.Pointer(unsafe.SliceData(f.Buf))),
		(*C.int32_t)(unsafe.Pointer(unsafe.SliceData(f.Ends))), C.int(f.Len()))
	if rc != 0 {
		return zmqError(int(-rc))
	}
	return nil
}

func zmqError(errno int) error { return zmq.Errno(syscall.Errno(errno)) }
