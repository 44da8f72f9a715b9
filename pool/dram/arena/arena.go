// Package arena is the memory that a pool's slots lie in: memory of the process, or a file that
// outlives the process and describes its slots. A file is locked by one process at a time.
package arena

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

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

// maxNode is the last NUMA node of Linux.
const maxNode = 1023

// Modes of mbind in linux/mempolicy.h. In both, pages come from other nodes when these are full.
const (
	mpolPreferred  = 1
	mpolInterleave = 3
)

// Place sets the preferred NUMA nodes of an arena's pages, interleaved if there are several. The
// policy belongs to the file: it applies to any process that first touches a page, and not to
// existing pages. Place returns its result as text; where the kernel or the container refuses,
// access is only slower.
func (a *Arena) Place(nodes []int) string {
	if len(nodes) == 0 {
		return ""
	}
	if err := bindPages(a.raw, nodes); err != nil {
		return fmt.Sprintf("not on %s first: %v", nameNodes(nodes), err)
	}
	return nameNodes(nodes) + " first"
}

func bindPages(mem []byte, nodes []int) error {
	var mask [(maxNode + 1) / 64]uint64
	for _, n := range nodes {
		if n < 0 || n > maxNode {
			return fmt.Errorf("node %d is not within 0 and %d", n, maxNode)
		}
		mask[n/64] |= 1 << (n % 64)
	}
	mode := uintptr(mpolPreferred)
	if len(nodes) > 1 {
		mode = mpolInterleave
	}
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), mode,
		uintptr(unsafe.Pointer(&mask)), maxNode+2, 0)
	if errno != 0 {
		return fmt.Errorf("mbind: %w", errno)
	}
	return nil
}

func nameNodes(nodes []int) string {
	if len(nodes) == 1 {
		return fmt.Sprintf("NUMA node %d", nodes[0])
	}
	return fmt.Sprintf("NUMA nodes %v in turn", slices.Sorted(slices.Values(nodes)))
}

// MaxBadPages is with how many bad pages a pool is not healthy.
const MaxBadPages = 256

// populatePiece is populated in one call, which bounds how long Close waits.
const populatePiece = 64 << 20

// populating allocates an arena's (zeroed) pages in the background. The goroutine is the arena's;
// StopPopulating waits for it.
type populating struct {
	stop atomic.Bool
	done sync.WaitGroup
	err  error // valid when done
}

// Populate begins to allocate the arena's pages. Where a page cannot be had, it calls probe, which
// touches the pages of a range one by one, retires the bad ones and returns their number.
func (a *Arena) Populate(probe func(from, to int64) (bad int)) {
	left, base, p := MaxBadPages, a.base, &a.populating
	p.done.Go(func() {
		for off := 0; off < len(base) && !p.stop.Load(); off += populatePiece {
			to := min(off+populatePiece, len(base))
			err := populate(base[off:to])
			if errors.Is(err, unix.EHWPOISON) || errors.Is(err, unix.EFAULT) {
				if bad := probe(int64(off), int64(to)); bad <= left {
					left, err = left-bad, nil
				}
			}
			if err != nil {
				p.err = fmt.Errorf("dram: populate at %d of %d bytes: %w", off, len(base), err)
				return
			}
			a.ready.Store(int64(to))
		}
	})
}

// populate faults pages in for writing without changing a byte: slots may be in use meanwhile.
func populate(b []byte) error {
	for {
		switch err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		case errors.Is(err, unix.EINVAL): // before Linux 5.14: pages are allocated on first access
			return nil
		default:
			return err
		}
	}
}

// Populated waits until populating has ended, and returns why it ended early.
func (a *Arena) Populated() error {
	a.populating.done.Wait()
	return a.populating.err
}

// StopPopulating ends populating.
func (a *Arena) StopPopulating() {
	a.populating.stop.Store(true)
	a.populating.done.Wait()
}

// Ready returns how many bytes are populated.
func (a *Arena) Ready() int64 { return a.ready.Load() }

// MakeHuge asks for transparent huge pages where the arena's own are small.
func (a *Arena) MakeHuge() {
	if a.pageBytes != HugePageBytes {
		_ = unix.Madvise(a.raw, unix.MADV_HUGEPAGE)
	}
}
