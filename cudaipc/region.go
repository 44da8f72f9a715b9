package cudaipc

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Opened is an imported region: mapped here (Mem), or at an address of the peer's process or of a
// GPU.
type Opened struct {
	Size uint64
	Mem  []byte // KindFD
	Addr uint64 // the other kinds
}

// Close unmaps the region, if it is mapped here.
func (r *Opened) Close() {
	if r.Mem != nil {
		_ = Unmap(r.Mem)
	}
}

// MapFD maps size bytes of a file that must live in memory: a page of another file system may
// take any time to load.
func MapFD(fd int, size int64) ([]byte, error) {
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

// Unmap ends a mapping of MapFD, whose length is its capacity.
func Unmap(mem []byte) error { return unix.Munmap(mem[:cap(mem)]) }

// HasFD reports whether a region of this kind comes with a descriptor.
func (r *Region) HasFD() bool { return r.Kind == KindFD || r.Kind == KindCUDAFD }

// OnGPU reports whether a peer has GPU memory, and so a GPU's events.
func (im *Import) OnGPU() bool {
	for i := range im.Regions {
		if k := im.Regions[i].Kind; k == KindCUDA || k == KindCUDAFD {
			return true
		}
	}
	return false
}

// CloseRegions closes the descriptors of an import's regions.
func (im *Import) CloseRegions() {
	for i := range im.Regions {
		if r := &im.Regions[i]; r.HasFD() && r.FD >= 0 {
			_ = unix.Close(r.FD)
		}
	}
}

// CloseAll closes every descriptor of an import.
func (im *Import) CloseAll() {
	im.CloseRegions()
	if im.Proof > 0 {
		_ = unix.Close(im.Proof)
	}
}

// Dup returns the same region with a descriptor of its own, for a device in this process.
func (r Region) Dup() (Region, error) {
	fd, err := unix.FcntlInt(uintptr(r.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return Region{}, fmt.Errorf("region %d: %w", r.ID, err)
	}
	r.FD = fd
	return r, nil
}
