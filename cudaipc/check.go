package cudaipc

import (
	"fmt"
	"math/bits"
)

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
