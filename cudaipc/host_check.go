package cudaipc

import "fmt"

// checkCopy holds every run against its region and the arena. Offsets come from other processes: nothing here
// may overflow.
func (p *peer) checkCopy(c *Copy, arena int) error {
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

func (p *peer) checkRuns(runs []Run, arena uint64) error {
	var r *region
	for i := range runs {
		run := &runs[i]
		if i == 0 || run.Region != runs[i-1].Region {
			r = p.regions[run.Region]
		}
		if r == nil {
			return fmt.Errorf("run %d: region %d is not there: %w", i, run.Region, ErrRange)
		}
		length := uint64(run.Len)
		if run.RegionOff > r.size || length > r.size-run.RegionOff {
			return fmt.Errorf("run %d: %d bytes at %d of region %d, which has %d: %w",
				i, run.Len, run.RegionOff, run.Region, r.size, ErrRange)
		}
		if off := uint64(run.ArenaOff); run.ArenaOff < 0 || off > arena || length > arena-off {
			return fmt.Errorf("run %d: %d bytes at %d of the arena, which has %d: %w", i, run.Len, run.ArenaOff, arena, ErrRange)
		}
	}
	return nil
}
