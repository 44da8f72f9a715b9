package cudaipc

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// region is an imported region of the host device: mapped here (mem), or a range of the peer's process.
type region struct {
	size uint64
	mem  []byte // KindFD
	addr uint64 // KindPeer
}

// openRegion opens one region. The descriptor is the caller's to close.
func openRegion(r *Region, pid int) (*region, error) {
	if r.Size == 0 || r.Size > MaxPeerBytes {
		return nil, fmt.Errorf("size %d is not within 1 and %d bytes: %w", r.Size, int64(MaxPeerBytes), ErrRange)
	}
	switch r.Kind {
	case KindFD:
		mem, err := mapFD(r.FD, int64(r.Size))
		return &region{size: r.Size, mem: mem}, err
	case KindPeer:
		if pid <= 0 {
			return nil, fmt.Errorf("the peer's process is not known (share the PID namespace): %w", ErrKind)
		}
		if r.Addr > math.MaxInt64 || r.Addr+r.Size > math.MaxInt64 {
			return nil, fmt.Errorf("address %#x and size %d: %w", r.Addr, r.Size, ErrRange)
		}
		return &region{size: r.Size, addr: r.Addr}, nil
	}
	return nil, fmt.Errorf("kind %d on the host device: %w", r.Kind, ErrKind)
}

func (r *region) close() {
	if r.mem != nil {
		_ = unmap(r.mem)
	}
}

// mapFD maps size bytes of a file that must live in memory: a page of any other file system may take any time
// to come, or never do.
func mapFD(fd int, size int64) ([]byte, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, fmt.Errorf("fstat: %w", err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return nil, fmt.Errorf("fstatfs: %w", err)
	}
	if fs.Type != unix.TMPFS_MAGIC && fs.Type != unix.HUGETLBFS_MAGIC {
		return nil, fmt.Errorf("file system %#x, not memory: %w", fs.Type, ErrKind)
	}
	if size <= 0 || size > stat.Size || size != int64(int(size)) {
		return nil, fmt.Errorf("%d bytes of a file of %d: %w", size, stat.Size, ErrRange)
	}
	pages := (size + fs.Bsize - 1) / fs.Bsize * fs.Bsize // huge pages are mapped, and unmapped, as wholes
	mem, err := unix.Mmap(fd, 0, int(pages), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap of %d bytes: %w", pages, err)
	}
	return mem[:size], nil
}

// unmap ends a mapping of mapFD, which is as long as its capacity.
func unmap(mem []byte) error { return unix.Munmap(mem[:cap(mem)]) }
