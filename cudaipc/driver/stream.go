//go:build cuda

package driver

/*
#include <cuda.h>
*/
import "C"

import (
	"unsafe"

	"gorgonia.org/cu"
)

// Stream is a queue of work for the GPU, which does not wait for the default stream.
type Stream struct{ s cu.Stream }

func (s Stream) handle() C.CUstream { return C.CUstream(unsafe.Pointer(s.s.C())) }

// NewStream makes a stream. Lower numbers go first.
func NewStream(priority int) (Stream, error) {
	s, err := cu.MakeStreamWithPriority(priority, cu.NonBlocking)
	return Stream{s}, of("cuStreamCreateWithPriority", err)
}

// Priorities returns the lowest and the highest priority for NewStream.
func Priorities() (last, first int, err error) {
	last, first, err = cu.StreamPriorityRange()
	return last, first, of("cuCtxGetStreamPriorityRange", err)
}

// Destroy destroys the stream once its work has ended; it does not wait for that.
func (s Stream) Destroy() error { return of("cuStreamDestroy", s.s.Destroy()) }

// WaitFor makes the stream wait until the word at a, of this process's pinned memory, is n or
// more.
func (s Stream) WaitFor(a Addr, n uint32) error {
	return of("cuStreamWaitValue32", s.s.WaitOnValue32(cu.DevicePtr(a), n, C.CU_STREAM_WAIT_VALUE_GEQ))
}

// Tell writes n to the word at a when the stream reaches it.
func (s Stream) Tell(a Addr, n uint32) error {
	return of("cuStreamWriteValue32", s.s.WriteValue32(cu.DevicePtr(a), n, C.CU_STREAM_WRITE_VALUE_DEFAULT))
}

// Set writes n to count words of 4 bytes at a when the stream reaches it.
func (s Stream) Set(a Addr, n uint32, count int64) error {
	return of("cuMemsetD32Async", cu.MemsetD32Async(cu.DevicePtr(a), uint(n), count, s.s))
}
