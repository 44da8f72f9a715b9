// Package offheap holds memory off the Go heap: an array that grows in place, and a hash table of
// numbered entries, with the hash of its keys.
package offheap

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	pageBytes = 4 << 10
	hugeBytes = 2 << 20
	// hugeFrom is the size from which a table asks for huge pages; below it, rounding would cost
	// more than the table itself.
	hugeFrom = 32 << 20
)

// Region is an array of T off the Go heap. Its address space is reserved in full and made usable as
// it grows, so it never moves and is never scanned.
type Region[T any] struct {
	All    []T // reserved; only all[:usable] may be touched
	raw    []byte
	usable int // elements
	bytes  int // of raw, usable
}

// Reserve reserves address space for n elements; none may be accessed yet.
func Reserve[T any](n int) (r Region[T], err error) {
	size := int(unsafe.Sizeof(*new(T)))
	length := (n*size + hugeBytes - 1) &^ (hugeBytes - 1)
	r.raw, err = unix.Mmap(-1, 0, length, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return r, fmt.Errorf("dram: reserve %d bytes of address space: %w", length, err)
	}
	r.All = unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(r.raw))), n)
	return r, nil
}

// Grow makes at least n elements usable; false if the kernel has no memory for them or n is beyond
// the end.
func (r *Region[T]) Grow(n int) bool {
	if n <= r.usable {
		return true
	}
	if n > len(r.All) {
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
		// This is only advice: the region works without huge pages, but is slower.
		_ = unix.Madvise(r.raw[:to], unix.MADV_HUGEPAGE)
		if r.bytes < hugeFrom {
			_ = unix.Madvise(r.raw[:r.bytes&^(hugeBytes-1)], unix.MADV_COLLAPSE)
		}
	}
	r.bytes = to
	r.usable = min(to/size, len(r.All))
	return true
}

// Resident returns the memory that the first n elements hold.
func (r *Region[T]) Resident(n int) int64 {
	used := n * int(unsafe.Sizeof(*new(T)))
	step := pageBytes
	if used > hugeFrom {
		step = hugeBytes
	}
	return int64((used + step - 1) &^ (step - 1))
}

// Close unmaps the memory.
func (r *Region[T]) Close() error {
	if r.raw == nil {
		return nil
	}
	raw := r.raw
	*r = Region[T]{}
	return unix.Munmap(raw)
}

// Mapped returns the memory that may be accessed.
func (r *Region[T]) Mapped() []byte { return r.raw[:r.bytes] }
