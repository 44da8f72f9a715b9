package dram

import "slices"

// collateral bounds what goes with a slab that is taken: entries in other slabs hang on those in it.
const collateral = 4 // times the slots of the slab, plus maxPartials

// takeSlab empties a slab of another class, one in which many of the oldest entries lie. All that hangs on its entries
// goes with them. A slab with an entry that is held, or has one hanging on it, is left alone.
func (c *core) takeSlab(class int32) bool {
	aged, n := c.agedSlabs(class)
	for _, t := range aged[:n] {
		if c.work.slabs == 0 {
			return false
		}
		c.work.slabs--
		if c.emptySlab(t.slab, collateral*c.slabs.slab[t.slab].used+maxPartials) {
			return true
		}
	}
	for range c.slabs.slab {
		if c.work.slabs == 0 {
			return false
		}
		c.hand = (c.hand + 1) % len(c.slabs.slab)
		if b := &c.slabs.slab[c.hand]; b.class == class || b.class == noClass {
			continue
		}
		c.work.slabs--
		if c.emptySlab(int32(c.hand), c.high) {
			return true
		}
	}
	return false
}

// tally is how many of the oldest entries begin in a slab.
type tally struct {
	slab  int32
	count int
}

// agedSlabs are slabs of other classes in which the oldest entries lie, those with most of them first.
func (c *core) agedSlabs(class int32) (first [maxSlabs / 2]tally, n int) {
	var seen [nearOldest]tally
	for e, left := c.recent.oldest, nearOldest; e != none && left > 0; e, left = c.recs.all[e].newer, left-1 {
		at := int32(c.recs.all[e].head >> c.slabs.slotBits)
		if c.slabs.slab[at].class == class {
			continue
		}
		i := slices.IndexFunc(seen[:n], func(t tally) bool { return t.slab == at })
		if i < 0 {
			i = n
			seen[i].slab = at
			n++
		}
		seen[i].count++
	}
	slices.SortStableFunc(seen[:n], func(a, b tally) int { return b.count - a.count })
	return first, copy(first[:], seen[:n])
}

// emptySlab evicts every entry in a slab and what hangs on them, if nobody holds any of it and it is at most limit
// entries.
func (c *core) emptySlab(n int32, limit uint32) bool {
	trees, ok := c.treesIn(n, int(limit), c.scratch[:0])
	for _, e := range trees {
		c.recs.all[e].hold &^= flagMarked
	}
	if ok {
		c.evictAll(trees)
	}
	c.scratch = trees[:0]
	return ok
}

// treesIn appends and marks the entries in a slab and what hangs on them.
func (c *core) treesIn(n int32, limit int, out []uint32) ([]uint32, bool) {
	for place, busy := range c.slabs.inUse(n) {
		if !busy {
			continue
		}
		e := c.owner(uint32(n)<<c.slabs.slotBits | uint32(place))
		if c.recs.all[e].is(flagMarked) {
			continue
		}
		if e == none || c.recs.all[e].is(flagDropped) { // being created; or dropped, and held, or it would be free
			return out, false
		}
		var ok bool
		if out, ok = c.tree(e, limit, out); !ok {
			return out, false
		}
	}
	return out, true
}
