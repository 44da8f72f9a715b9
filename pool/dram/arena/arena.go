// Package arena is the memory that a pool's slots lie in: memory of the process, or a file that
// outlives the process and describes its slots. A file is locked by one process at a time.
package arena

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Sizes of the pages that an arena may lie on, bytes.
const (
	PageBytes     = 4 << 10
	HugePageBytes = 2 << 20
)

// Arena is the memory that the slots lie in.
type Arena struct {
	base      []byte
	raw       []byte // base, rounded up to whole pages
	fd        int
	pageBytes int64
	reason    string // why not huge pages

	ready      atomic.Int64 // bytes populated
	populating populating
}

// Open maps memory of the process, on huge pages if huge is set and enough are free.
func Open(bytes int64, huge bool) (*Arena, error) {
	a, reason := hugeArena(bytes, huge)
	if reason == "" {
		return a, nil
	}
	if err := checkMemory(bytes, systemFiles); err != nil {
		return nil, err
	}
	a, err := mapMemfd(bytes, PageBytes, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	a.reason = reason
	return a, nil
}

// hugeArena maps huge pages, which the kernel reserves at once, or returns why not.
func hugeArena(bytes int64, may bool) (*Arena, string) {
	if !may {
		return nil, "switched off"
	}
	free, err := freeHugePages(systemFiles)
	if err != nil {
		return nil, err.Error()
	}
	need := (bytes + HugePageBytes - 1) / HugePageBytes
	if free < need {
		return nil, fmt.Sprintf("%d pages of 2 MiB needed, %d free", need, free)
	}
	a, err := mapMemfd(bytes, HugePageBytes, unix.MFD_CLOEXEC|unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
	if err != nil {
		return nil, err.Error()
	}
	return a, ""
}

func mapMemfd(bytes, page int64, flags int) (*Arena, error) {
	size := (bytes + page - 1) &^ (page - 1)
	fd, err := unix.MemfdCreate("kvagent-pool", flags)
	if err != nil {
		return nil, fmt.Errorf("dram: memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		return nil, errors.Join(fmt.Errorf("dram: arena of %d bytes: %w", size, err), unix.Close(fd))
	}
	a, err := mapArena(fd, bytes, page)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return a, nil
}

// mapArena maps the start of a file, rounded up to whole pages.
func mapArena(fd int, bytes, page int64) (*Arena, error) {
	size := roundUp(bytes, page)
	raw, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("dram: map arena of %d bytes: %w", size, err)
	}
	return &Arena{base: raw[:bytes:bytes], raw: raw, fd: fd, pageBytes: page}, nil
}

// Virtual maps address space only: the arena has no descriptor and is not populated.
func Virtual(bytes int64) (*Arena, error) {
	raw, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("dram: reserve %d bytes of address space: %w", bytes, err)
	}
	return &Arena{base: raw, raw: raw, fd: -1, pageBytes: PageBytes, reason: "virtual"}, nil
}

// Memory returns the memory, and the descriptor from which it can be mapped; -1 for a virtual one.
func (a *Arena) Memory() (base []byte, fd int) { return a.base, a.fd }

// Page returns the size of a page, and why pages are not huge; empty if they are.
func (a *Arena) Page() (bytes int64, reason string) { return a.pageBytes, a.reason }

// Close unmaps the memory. Populating must have ended.
func (a *Arena) Close() error {
	err := unix.Munmap(a.raw)
	if a.fd >= 0 {
		err = errors.Join(err, unix.Close(a.fd))
	}
	return err
}
