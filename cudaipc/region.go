package cudaipc

import (
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pagefault"
)

// Opened is an imported region: mapped here (Mem), or at an address of the peer or of a GPU.
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

// MapFD maps size bytes of a file in memory: a page of another file system may take long to load.
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

// check checks the numbers and sizes of the regions. One number may be there again for a further
// piece of virtual memory alone, next to the piece before.
func (im *Import) check() error {
	if len(im.Regions) > MaxRegions {
		return fmt.Errorf("%d regions and pieces, at most %d: %w", len(im.Regions), MaxRegions, ErrRange)
	}
	var total uint64
	last := map[RegionID]int{}
	for i := range im.Regions {
		r := &im.Regions[i]
		if r.Size == 0 || r.Size > MaxPeerBytes-total {
			return fmt.Errorf("region %d: %d bytes after %d, allowed: 1 to %d in all: %w", r.ID, r.Size, total,
				int64(MaxPeerBytes), ErrRange)
		}
		total += r.Size
		if before, twice := last[r.ID]; twice && (before != i-1 || r.Kind != KindCUDAFD ||
			im.Regions[before].Kind != KindCUDAFD) {
			return fmt.Errorf("region %d: it is there twice: %w", r.ID, ErrRange)
		}
		last[r.ID] = i
	}
	return nil
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
	MaxCopies    = 1024    // copies of one peer that are in flight
	MaxCopyRuns  = 1 << 20 // runs of one copy
)

// checkCopy checks every run against its region and the arena. Offsets come from other processes:
// nothing here may overflow.
func (p *Base) checkCopy(c *Copy, arena int64) error {
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

func (p *Base) checkRuns(runs []Run, arena uint64) error {
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

// checkSample checks a sample against the peer's regions. Nothing here may overflow.
func (p *Base) checkSample(s *Sample) error {
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

// stepWord, event and revoke words lie in memory that two processes share. They are read and
// written only by atomic operations, which on the machines Go runs on order the plain writes of the
// bytes around them too. The words are little-endian; so are the machines this device is built for
// (amd64, arm64).

// Word64 returns a word of 8 bytes of shared memory.
func Word64(mem []byte, off uint64) *uint64 {
	return (*uint64)(unsafe.Pointer(&mem[off : off+8][0]))
}

// Word32 returns a word of 4 bytes of shared memory.
func Word32(mem []byte, off uint64) *uint32 {
	return (*uint32)(unsafe.Pointer(&mem[off : off+4][0]))
}

// fired reports whether the event whose cell begins at off has fired. It loads the fired count
// first, so that an event recorded again in between can only look pending, never fired too early.
func fired(mem []byte, off uint64) bool {
	done := atomic.LoadUint64(Word64(mem, off+8))
	return done >= atomic.LoadUint64(Word64(mem, off))
}

// check checks the places of a peer's words, with event cells of cell bytes, in their region.
func (s *Sync) check(size, cell uint64) error {
	if err := words("step", s.StepOff, 1, 8, 8, size); err != nil {
		return err
	}
	if err := words("events", s.EventsOff, s.Events, cell, 8, size); err != nil {
		return err
	}
	return words("revoke", s.RevokeOff, s.Revokes, 4, 4, size)
}

func words(name string, off uint64, n uint32, each, align, size uint64) error {
	if off%align != 0 {
		return fmt.Errorf("sync: %s words at %d: not a multiple of %d: %w", name, off, align, ErrRange)
	}
	if length := uint64(n) * each; off > size || length > size-off {
		return fmt.Errorf("sync: %d %s words at %d: the region has %d bytes: %w", n, name, off, size, ErrRange)
	}
	return nil
}

// SetWord writes a word of the peer's sync region, whose pages may vanish at any time.
func (p *Base) SetWord(off, value uint64) error {
	return p.Use(func() error {
		if size := uint64(len(p.Words)); off%8 != 0 || off > size || size-off < 8 {
			return fmt.Errorf("word of 8 bytes at %d of the sync region, which has %d: %w", off, size, ErrRange)
		}
		return p.guard(func() { atomic.StoreUint64(Word64(p.Words, off), value) })
	})
}

// guard calls f, which touches the words. Their pages may vanish at any time, which is an error.
func (p *Base) guard(f func()) error {
	if err := pagefault.Guard(p.Words, p.Words, f); err != nil {
		return fmt.Errorf("sync words: %w: %w", err, ErrPeer)
	}
	return nil
}

// Poll answers a wait from the words of a peer, including the event.
func (p *Base) Poll(w Wait) (s State, err error) {
	err = p.Use(func() error { return p.PollWords(&w, &s) })
	return s, err
}

// PollStep answers a wait for an event that only the driver can answer, as far as the words do:
// the event has not fired. ask reports that the awaited step has been reached, so that the event
// decides. It is called in Use.
func (p *Base) PollStep(w Wait) (s State, ask bool, err error) {
	if err := p.checkWait(&w); err != nil {
		return s, false, err
	}
	event := w.Event
	w.Event = None
	err = p.PollWords(&w, &s)
	if err != nil || event == None || p.Words == nil {
		return s, false, err
	}
	s.Fired = false
	return s, s.Step >= w.Step, nil
}

// checkWait checks a wait against the counts of the peer's events and revocation words.
func (p *Base) checkWait(w *Wait) error {
	if (w.Event != None && w.Event >= p.sync.Events) || (w.Revoke != None && w.Revoke >= p.sync.Revokes) {
		return fmt.Errorf("event %d of %d, revocation word %d of %d: %w",
			w.Event, p.sync.Events, w.Revoke, p.sync.Revokes, ErrRange)
	}
	return nil
}

// PollWords reads a peer's words. It is called in Use.
func (p *Base) PollWords(w *Wait, s *State) error {
	if err := p.checkWait(w); err != nil {
		return err
	}
	if s.Fired = true; p.Words == nil {
		return nil
	}
	return p.guard(func() { p.read(w, s) })
}

// read loads the event before the step word: a fired one then proves the step written before it.
func (p *Base) read(w *Wait, s *State) {
	if w.Event != None {
		s.Fired = fired(p.Words, p.sync.EventsOff+uint64(w.Event)*EventCell)
	}
	s.Step = atomic.LoadUint64(Word64(p.Words, p.sync.StepOff))
	if w.Revoke != None {
		s.Revoked = atomic.LoadUint32(Word32(p.Words, p.sync.RevokeOff+uint64(w.Revoke)*4)) != 0
	}
}
