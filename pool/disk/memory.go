package disk

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugeBytes is the size of a huge page. A device takes a limited number of physically contiguous
// ranges per request, so one call is many requests from small pages and few from huge ones.
const hugeBytes = 2 << 20

// mapMemory returns n bytes, rounded up to whole pages, off the Go heap and aligned for O_DIRECT.
// From hugeBytes on they are in huge pages, as far as the kernel has any.
func mapMemory(n int64) ([]byte, error) {
	n = roundUp(max(n, 1), pageBytes)
	if n < hugeBytes {
		return mapPages(n)
	}
	n = roundUp(n, hugeBytes)
	p, err := mapPages(n + hugeBytes)
	if err != nil {
		return nil, err
	}
	before := -int64(uintptr(unsafe.Pointer(unsafe.SliceData(p)))) & (hugeBytes - 1)
	_ = unmap(p[:before:before]) // unused memory stays mapped if it cannot be unmapped
	_ = unmap(p[before+n:])
	p = p[before:][:n:n]
	_ = unix.Madvise(p, unix.MADV_HUGEPAGE) // a kernel without huge pages uses small ones
	return p, nil
}

// mapPages returns n bytes, a multiple of pageBytes. Memory is allocated on first access.
func mapPages(n int64) ([]byte, error) {
	p, err := unix.MmapPtr(
		-1, 0, nil, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE,
	)
	if err != nil {
		return nil, fmt.Errorf("disk: %d bytes of memory: %w", n, err)
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// unmap frees what mapMemory or mapPages returned, or whole pages of it.
func unmap(p []byte) error {
	if cap(p) == 0 {
		return nil
	}
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(p)), uintptr(cap(p)))
}

// bounce is a buffer that grows to the requested size. It belongs to one goroutine.
type bounce struct {
	lent []byte // used where it is large enough; its owner unmaps it
	p    []byte
}

func (b *bounce) atLeast(n int64) ([]byte, error) {
	if int64(len(b.lent)) >= n {
		return b.lent[:n], nil
	}
	if int64(len(b.p)) >= n {
		return b.p[:n], nil
	}
	p, err := mapMemory(n)
	if err != nil {
		return nil, err
	}
	b.free()
	b.p = p
	return p[:n], nil
}

func (b *bounce) free() {
	_ = unmap(b.p) // it was mapped by mapMemory
	b.p = nil
}
