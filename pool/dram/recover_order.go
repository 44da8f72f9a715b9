package dram

import "slices"

// restoreOrder makes all entries visible, hangs them on the entries before them, and puts them in
// the order in which they were stored or loaded last.
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

// restoreTick takes in the entries of one tick. What was stored first is nearer to the beginning of
// its chain, and goes last.
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
		// The policy is told of each piece of a chain by itself: it learns from how long it is.
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

// restoreChains hangs entries on those before them, as far as these are there and no circle comes
// of it.
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
			c.hang(e, p)
		}
	}
}

// restoredParent is the entry whose slot and tag e was stored with; none if it is gone.
func (c *core) restoredParent(e uint32) uint32 {
	w := c.header(c.recs.All[e].head).Parent.Load()
	slot := uint32(w>>32) - 1
	if w == 0 || !c.slabs.Given(slot) || !c.header(slot).Whole(slot) {
		return none
	}
	p := c.owner(slot)
	r := &c.recs.All[p]
	if p == e || r.head != slot || r.ident != c.recs.All[e].ident || r.hash.tag() != uint32(w) {
		return none
	}
	return p
}

// cutCircle walks up from e and makes a root of an entry that the walk comes back to.
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

// hang is link where it is known that no circle comes of it.
func (c *core) hang(child, parent uint32) {
	recs := c.recs.All
	r, p := &recs[child], &recs[parent]
	r.prev, r.next = parent|upward, p.child
	if p.child != none {
		recs[p.child].prev = child
	}
	p.child = child
}
