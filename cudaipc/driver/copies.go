//go:build cuda

package driver

// #include "copies.h"
import "C"

import (
	"sync"
	"unsafe"
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
