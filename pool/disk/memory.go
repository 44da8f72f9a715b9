package disk

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// mapMemory gives n bytes, rounded up to whole pages, that are aligned as O_DIRECT wants it and that the collector never sees.
func mapMemory(n int64) ([]byte, error) {
	p, err := unix.Mmap(-1, 0, int(roundUp(max(n, 1), pageBytes)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("disk: %d bytes of memory: %w", n, err)
	}
	return p, nil
}

func unmap(p []byte) error {
	if p == nil {
		return nil
	}
	return unix.Munmap(p)
}

// bounce is memory that grows to what is asked of it. It belongs to one goroutine.
type bounce struct{ p []byte }

func (b *bounce) atLeast(n int64) ([]byte, error) {
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
