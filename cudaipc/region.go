package cudaipc

import (
	"fmt"
	"math/bits"

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

// Limits of every device.
const (
	MaxRegions   = 4096    // regions of one peer
	MaxPeerBytes = 1 << 43 // bytes of all regions of one peer; they take address space, not memory
	MaxCopies    = 1024    // copies of one peer that are in flight or not taken by Done
	MaxCopyRuns  = 1 << 20 // runs of one copy
)

// CheckCopy checks every run against its region and the arena. Offsets come from other processes:
// nothing here may overflow.
func (p *Peer) CheckCopy(c *Copy, arena int) error {
	if c.Dir != Gather && c.Dir != Scatter {
		return fmt.Errorf("direction %d: %w", c.Dir, ErrRange)
	}
	if len(c.Runs) > MaxCopyRuns {
		return fmt.Errorf("%d runs, at most %d: %w", len(c.Runs), MaxCopyRuns, ErrRange)
	}
	var total uint64
	for i := range c.Blocks {
		total += uint64(c.Blocks[i].Runs)
	}
	if total != uint64(len(c.Runs)) {
		return fmt.Errorf("blocks name %d runs, there are %d: %w", total, len(c.Runs), ErrRange)
	}
	return p.checkRuns(c.Runs, uint64(arena))
}

func (p *Peer) checkRuns(runs []Run, arena uint64) error {
	var r *Opened
	for i := range runs {
		run := &runs[i]
		if i == 0 || run.Region != runs[i-1].Region {
			r = p.Regions[run.Region]
		}
		if r == nil {
			return fmt.Errorf("run %d: region %d is not there: %w", i, run.Region, ErrRange)
		}
		length := uint64(run.Len)
		if run.RegionOff > r.Size || length > r.Size-run.RegionOff {
			return fmt.Errorf("run %d: %d bytes at %d of region %d, which has %d: %w",
				i, run.Len, run.RegionOff, run.Region, r.Size, ErrRange)
		}
		if off := uint64(run.ArenaOff); run.ArenaOff < 0 || off > arena || length > arena-off {
			return fmt.Errorf("run %d: %d bytes at %d of the arena, which has %d: %w", i, run.Len, run.ArenaOff, arena,
				ErrRange)
		}
	}
	return nil
}

// CheckSample checks a sample against the peer's regions. Nothing here may overflow.
func (p *Peer) CheckSample(s *Sample) error {
	switch {
	case s.Within <= 0 || s.Within > MaxSampleWait:
		return fmt.Errorf("within %v, allowed: above 0, at most %v: %w", s.Within, MaxSampleWait, ErrRange)
	case len(s.Pieces) > MaxCopyRuns || len(s.Blocks) > MaxCopyRuns:
		return fmt.Errorf("%d pieces, %d blocks, at most %d: %w", len(s.Pieces), len(s.Blocks), MaxCopyRuns, ErrRange)
	}
	last := uint32(0) // of the blocks: if it is within the regions, all are
	for i := range s.Blocks {
		last = max(last, s.Blocks[i].Block)
	}
	for i := range s.Pieces {
		piece := &s.Pieces[i]
		r := p.Regions[piece.Region]
		if r == nil {
			return fmt.Errorf("piece %d: region %d is not there: %w", i, piece.Region, ErrRange)
		}
		over, far := bits.Mul64(piece.Stride, uint64(last))
		if over != 0 || far > r.Size || piece.Offset > r.Size-far || uint64(piece.Bytes) > r.Size-far-piece.Offset {
			return fmt.Errorf("piece %d: %d bytes at %d + %d * %d of region %d, which has %d: %w",
				i, piece.Bytes, piece.Offset, last, piece.Stride, piece.Region, r.Size, ErrRange)
		}
	}
	return nil
}
