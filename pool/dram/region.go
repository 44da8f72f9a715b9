package dram

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	pageBytes = 4 << 10
	hugeBytes = 2 << 20
	// hugeFrom is the size from which a table asks for huge pages: below, their rounding would cost more
	// memory than the table itself.
	hugeFrom = 32 << 20
)

// table memory: an array of T off the Go heap, reserved in full and made usable as it grows, so that it never
// moves and the garbage collector never looks at it.
type region[T any] struct {
	all    []T // reserved; only all[:usable] may be touched
	raw    []byte
	usable int // elements
	bytes  int // of raw, usable
}

func reserveRegion[T any](n int) (r region[T], err error) {
	size := int(unsafe.Sizeof(*new(T)))
	length := (n*size + hugeBytes - 1) &^ (hugeBytes - 1)
	r.raw, err = unix.Mmap(-1, 0, length, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return r, fmt.Errorf("dram: reserve %d bytes of address space: %w", length, err)
	}
	r.all = unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(r.raw))), n)
	return r, nil
}

// grow makes at least n elements usable; false if the kernel has no memory for them or n is beyond the end.
func (r *region[T]) grow(n int) bool {
	if n <= r.usable {
		return true
	}
	if n > len(r.all) {
		return false
	}
	size := int(unsafe.Sizeof(*new(T)))
	to := max(n*size, r.bytes+r.bytes/4, 64<<10)
	step := pageBytes
	if to >= hugeFrom {
		step = hugeBytes
	}
	to = min((to+step-1)&^(step-1), len(r.raw))
	if unix.Mprotect(r.raw[r.bytes:to], unix.PROT_READ|unix.PROT_WRITE) != nil {
		return false
	}
	if step == hugeBytes {
		// Only advice: without huge pages everything works, slower.
		_ = unix.Madvise(r.raw[:to], unix.MADV_HUGEPAGE)
		if r.bytes < hugeFrom {
			_ = unix.Madvise(r.raw[:r.bytes&^(hugeBytes-1)], unix.MADV_COLLAPSE)
		}
	}
	r.bytes = to
	r.usable = min(to/size, len(r.all))
	return true
}

// resident is the memory that the first n elements hold.
func (r *region[T]) resident(n int) int64 {
	used := n * int(unsafe.Sizeof(*new(T)))
	step := pageBytes
	if used > hugeFrom {
		step = hugeBytes
	}
	return int64((used + step - 1) &^ (step - 1))
}

func (r *region[T]) close() error {
	if r.raw == nil {
		return nil
	}
	raw := r.raw
	*r = region[T]{}
	return unix.Munmap(raw)
}

// mapped is the memory that may be touched.
func (r *region[T]) mapped() []byte { return r.raw[:r.bytes] }
