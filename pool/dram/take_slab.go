package dram

import (
	"math"
	"slices"

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
	losses := c.losses(class)
	for range maxSurveys {
		loss := slices.Min(losses)
		if loss == mayNotGo {
			break
		}
		best := slices.Index(losses, loss)
		losses[best] = mayNotGo
		if entries, free := c.survey(int32(best)); free {
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

// mayNotGo is the loss with a slab that is free, retired, or of the class itself.
const mayNotGo = math.MaxInt64

// losses returns, for each slab, the bytes of its entries that are not among the oldest of all.
func (c *core) losses(class int32) []int64 {
	losses := make([]int64, len(c.slabs.slab))
	for n := range losses {
		losses[n] = mayNotGo
		if b := &c.slabs.slab[n]; b.class != noClass && b.class != class && !b.bad {
			losses[n] = int64(b.used) * c.slabs.slotBytes(b.class)
		}
	}
	e := c.unpinned(c.recent.oldest)
	for n := farOldest; e != none && n > 0; e, n = c.unpinned(c.recs.All[e].newer), n-1 {
		slot := c.recs.All[e].head
		for _, class := range c.group(c.recs.All[e].ident).classes {
			if loss := &losses[slot>>c.slabs.slotBits]; *loss != mayNotGo {
				*loss -= c.slabs.slotBytes(class)
			}
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
