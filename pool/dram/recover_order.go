package dram

import "slices"

// restoreOrder makes all entries visible, links them to their parents, and orders them by their
// last store or load.
func (c *core) restoreOrder() {
	f := c.file
	used := make([]uint32, c.high)
	f.TouchEach(1, c.high, func(e uint32) {
		if c.recs.All[e].is(flagLive) {
			used[e] = c.header(c.recs.All[e].head).Used.Load()
		}
	})
	order := make([]uint64, 0, c.stats.Partial)
	for e := uint32(1); e < c.high; e++ {
		if c.recs.All[e].is(flagLive) {
			f.AtLeast(used[e])
			order = append(order, uint64(used[e])<<32|uint64(e))
		}
	}
	slices.Sort(order)
	c.restoreChains()
	for from := 0; from < len(order); {
		to := from
		for to < len(order) && order[to]>>32 == order[from]>>32 {
			to++
		}
		c.restoreTick(order[from:to])
		from = to
	}
}

// restoreTick restores the entries of one tick. The first stored are nearest to the beginning of
// their chain, and are evicted last.
func (c *core) restoreTick(order []uint64) {
	for i := len(order) - 1; i >= 0; i-- {
		e := uint32(order[i])
		c.recs.All[e].hold |= flagVisible
		c.stats.Partial--
		c.stats.Entries++
		c.recent.push(c.recs.All, e)
	}
	if c.advisor == nil {
		return
	}
	for _, o := range order {
		// Each part of a chain is passed to the policy separately, because it learns from its
		// length.
		if e := uint32(o); len(c.shown) > 0 && c.recs.All[e].prev != c.shown[len(c.shown)-1]|upward {
			c.announce()
		}
		c.shown = append(c.shown, uint32(o))
	}
	c.announce()
}

// Marks of a walk up the chains.
const (
	markNone = iota
	markUnderWay
	markDone
)

// restoreChains links entries to their parents, where these exist and no cycle results.
func (c *core) restoreChains() {
	parents := make([]uint32, c.high)
	c.file.TouchEach(1, c.high, func(e uint32) {
		if c.recs.All[e].is(flagLive) {
			parents[e] = c.restoredParent(e)
		}
	})
	marks := make([]uint8, c.high)
	for e := uint32(1); e < c.high; e++ {
		cutCircle(parents, marks, e)
	}
	for e := c.high - 1; e > none; e-- {
		if p := parents[e]; p != none {
			c.linkRoot(e, p)
		}
	}
}

// restoredParent returns the entry whose slot and tag e was stored with; none if it is not stored.
func (c *core) restoredParent(e uint32) uint32 {
	w := c.header(c.recs.All[e].head).Parent.Load()
	slot := uint32(w>>32) - 1
	if w == 0 || !c.slabs.Given(slot) || !c.header(slot).Whole(slot) {
		return none
	}
	p := c.owner(slot)
	r := &c.recs.All[p]
	if p == e || r.head != slot || r.ident != c.recs.All[e].ident || r.hash.Tag() != uint32(w) {
		return none
	}
	return p
}

// cutCircle walks up from e and makes a root of an entry that the walk returns to.
func cutCircle(parents []uint32, marks []uint8, e uint32) {
	last := uint32(none)
	for at := e; at != none && marks[at] != markDone; at = parents[at] {
		if marks[at] == markUnderWay {
			parents[last] = none
			break
		}
		marks[at] = markUnderWay
		last = at
	}
	for at := e; at != none && marks[at] == markUnderWay; at = parents[at] {
		marks[at] = markDone
	}
}

// linkRoot links a root to a parent, for a pair that is known to make no cycle.
func (c *core) linkRoot(child, parent uint32) {
	recs := c.recs.All
	r, p := &recs[child], &recs[parent]
	r.prev, r.next = parent|upward, p.child
	if p.child != none {
		recs[p.child].prev = child
	}
	p.child = child
}
