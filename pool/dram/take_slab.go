package dram

import (
	"github.com/kvagent/kvagent/pool"
)

// A class without room takes a slab of another class: the one that loses least if all of its
// entries are evicted, also those in the middle of their chains. What follows these stays in other
// slabs. It is found again once they are stored again, and else ages out.

// maxSurveys bounds the slabs looked at for one without a held entry.
const maxSurveys = 16

// takeSlab evicts all entries of a slab of another class, which then is free, and reports whether
// there was one without a held entry.
func (c *core) takeSlab(class int32) bool {
	if c.work.noSlab {
		return false
	}
	losses := c.losses()
	for range maxSurveys {
		best := noSlab
		for n := range int32(len(losses)) {
			if losses[n] >= 0 && (best == noSlab || losses[n] < losses[best]) && c.slabs.mayGo(n, class) {
				best = n
			}
		}
		if best == noSlab {
			break
		}
		losses[best] = -1
		if entries, free := c.survey(best); free {
			for _, e := range entries {
				if !c.recs.All[e].is(flagDropped) && c.recs.All[e].is(flagLive) { // one may have several slots of it
					c.evict(e, pool.ByEviction)
				}
			}
			c.work.taken++
			return true
		}
	}
	c.work.noSlab = true
	return false
}

// losses returns, for each slab, the bytes of its entries that are not among the oldest of all.
func (c *core) losses() []int64 {
	losses := make([]int64, c.slabs.count())
	for n := range losses {
		losses[n] = c.slabs.usedIn(int32(n))
	}
	e := c.unpinned(c.recent.oldest)
	for n := farOldest; e != none && n > 0; e, n = c.unpinned(c.recs.All[e].newer), n-1 {
		slot := c.recs.All[e].head
		for range c.group(c.recs.All[e].ident).classes {
			losses[c.slabs.slabOf(slot)] -= c.slabs.sizeAt(slot)
			slot = c.slabs.at(slot).link
		}
	}
	return losses
}

// survey returns the entries with slots of a slab; free is false if one of them is held.
func (c *core) survey(n int32) (entries []uint32, free bool) {
	for place, busy := range c.slabs.inUse(n) {
		if !busy {
			continue
		}
		e := c.owner(c.slabs.slot(n, uint32(place)))
		if e == none || c.held(e) || c.recs.All[e].is(flagDropped) {
			return nil, false
		}
		entries = append(entries, e)
	}
	return entries, true
}
