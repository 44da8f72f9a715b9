//go:build cuda

package driver

/*
#include <cuda.h>
#include <string.h>
#include "copies.h"

static CUresult kvdrv_event_open(CUevent *e, const void *bytes) {
	CUipcEventHandle h;
	memcpy(&h, bytes, sizeof h);
	return cuIpcOpenEventHandle(e, h);
}
*/
import "C"

import (
	"sync"
	"unsafe"

	"gorgonia.org/cu"
)

// List is copies between the GPU and pinned memory of this process: three slices of equal length.
// Addresses of pinned memory are this process's own.
type List struct {
	Dst, Src []uint64
	Len      []uint64 // bytes
}

// Reset empties the list and keeps its capacity.
func (l *List) Reset() { l.Dst, l.Src, l.Len = l.Dst[:0], l.Src[:0], l.Len[:0] }

// Add appends one copy.
func (l *List) Add(dst, src, n uint64) {
	l.Dst, l.Src, l.Len = append(l.Dst, dst), append(l.Src, src), append(l.Len, n)
}

// Rect is Rows rows of Width bytes, at constant distances on both sides.
type Rect struct {
	Dst, Src                        uint64
	Width, Rows, DstPitch, SrcPitch uint64 // bytes, but Rows
}

// A Rect is the C struct.
var (
	_ [unsafe.Sizeof(Rect{}) - unsafe.Sizeof(C.kvdrv_rect{})]struct{}
	_ [unsafe.Sizeof(C.kvdrv_rect{}) - unsafe.Sizeof(Rect{})]struct{}
)

// Each starts the copies one by one. After an error, those before the failed one are in flight.
func (s Stream) Each(l *List, toHost bool) error {
	if len(l.Len) == 0 {
		return nil
	}
	var started C.size_t
	code := C.kvdrv_copy_each(u64(l.Dst), u64(l.Src), size(l.Len), C.size_t(len(l.Len)), truth(toHost), s.handle(),
		&started)
	return check("cuMemcpyAsync", int(code))
}

// Batch starts all copies by one call. They have no order among themselves.
func (s Stream) Batch(l *List) error {
	if len(l.Len) == 0 {
		return nil
	}
	code := C.kvdrv_copy_batch(u64(l.Dst), u64(l.Src), size(l.Len), C.size_t(len(l.Len)), s.handle())
	return check("cuMemcpyBatchAsync", int(code))
}

// HasBatch reports whether the driver has the batch call.
var HasBatch = sync.OnceValue(func() bool {
	return Load() == nil && C.kvdrv_find_batch(C.int(Version())) == C.CUDA_SUCCESS
})

// Rects starts rectangles one by one.
func (s Stream) Rects(list []Rect, toHost bool) error {
	if len(list) == 0 {
		return nil
	}
	var started C.size_t
	code := C.kvdrv_copy_rects((*C.kvdrv_rect)(unsafe.Pointer(&list[0])), C.size_t(len(list)), truth(toHost),
		s.handle(), &started)
	return check("cuMemcpy2DAsync", int(code))
}

func u64(s []uint64) *C.uint64_t { return (*C.uint64_t)(unsafe.Pointer(&s[0])) }
func size(s []uint64) *C.size_t  { return (*C.size_t)(unsafe.Pointer(&s[0])) }

func truth(b bool) C.int {
	if b {
		return 1
	}
	return 0
}

// Event is an event of this process, or one that it has opened.
type Event struct{ e cu.Event }

// cu.Event is one handle and nothing else.
var (
	_ [unsafe.Sizeof(cu.Event{}) - unsafe.Sizeof(C.CUevent(nil))]struct{}
	_ [unsafe.Sizeof(C.CUevent(nil)) - unsafe.Sizeof(cu.Event{})]struct{}
)

func (e Event) handle() C.CUevent { return *(*C.CUevent)(unsafe.Pointer(&e.e)) }

// NewEvent makes an event without timing. A shared one can be exported.
func NewEvent(shared bool) (Event, error) {
	flags := cu.DisableTiming
	if shared {
		flags |= cu.InterprocessEvent
	}
	e, err := cu.MakeEvent(flags)
	return Event{e}, of("cuEventCreate", err)
}

// Export makes the handle of a shared event.
func (e Event) Export() (h Handle, err error) {
	var c C.CUipcEventHandle
	err = check("cuIpcGetEventHandle", int(C.cuIpcGetEventHandle(&c, e.handle())))
	return *(*Handle)(unsafe.Pointer(&c)), err
}

// OpenEvent opens another process's event.
func OpenEvent(h *Handle) (Event, error) {
	var c C.CUevent
	err := check("cuIpcOpenEventHandle", int(C.kvdrv_event_open(&c, unsafe.Pointer(h))))
	return Event{*(*cu.Event)(unsafe.Pointer(&c))}, err
}

// Record records the event after everything launched on the stream so far.
func (e Event) Record(s Stream) error { return of("cuEventRecord", e.e.Record(s.s)) }

// Fired reports whether the work before the event's record has ended.
func (e Event) Fired() (bool, error) {
	err := e.e.Query()
	if err == nil {
		return true, nil
	}
	if err == cu.NotReady { //nolint:errorlint // a CUresult, which nothing wraps
		return false, nil
	}
	return false, of("cuEventQuery", err)
}

// Destroy destroys the event here; an opened one stays valid in its own process.
func (e Event) Destroy() error { return of("cuEventDestroy", cu.DestroyEvent(&e.e)) }

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
