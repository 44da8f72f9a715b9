package dram

// Entries hang on the entry of the block before them: a parent has a list of children. Nothing that
// has children is evicted, and no circle can come to be, or its entries could never be evicted
// again.

// maxSteps bounds the walks that prove that links make no circle, of one batch under the lock;
// beyond it links are not made.
const maxSteps = 16 << 10

// link hangs child on parent if it hangs on nothing and no circle comes of it.
func (c *core) link(child, parent uint32) {
	recs := c.recs.All
	r := &recs[child]
	if r.prev != none || child == parent {
		return
	}
	if r.child != none && !c.surelyApart(child, parent) {
		return
	}
	p := &recs[parent]
	r.prev, r.next = parent|upward, p.child
	if p.child != none {
		recs[p.child].prev = child
	}
	p.child = child
	c.persistParent(child, parent)
}

// apart is true if child, a root, is surely not above parent.
func (c *core) surelyApart(child, parent uint32) bool {
	root := c.root(parent)
	return root != none && root != child
}

// root is the first entry above e, e itself if it hangs on nothing, none if that is too far to see.
func (c *core) root(e uint32) uint32 {
	recs := c.recs.All
	for ; c.work.steps > 0; c.work.steps-- {
		up := recs[e].prev
		if up == none {
			return e
		}
		e = up &^ upward // a sibling, or the parent at last
	}
	return none
}

// maxSiblings bounds the younger siblings that are gone through to find a parent.
const maxSiblings = 16

// parent is the entry that e hangs on; none if it hangs on nothing, or many hang there that came
// after it.
func (c *core) parent(e uint32) uint32 {
	for range maxSiblings {
		e = c.recs.All[e].prev
		if e == none || e&upward != 0 {
			return e &^ upward
		}
	}
	return none
}

// unlink takes e out of the children of its parent.
func (c *core) unlink(e uint32) {
	recs := c.recs.All
	r := &recs[e]
	switch {
	case r.prev == none:
	case r.prev&upward != 0:
		recs[r.prev&^upward].child = r.next
	default:
		recs[r.prev].next = r.next
	}
	if r.next != none {
		recs[r.next].prev = r.prev
	}
	r.prev, r.next = none, none
}

// orphan makes roots of the children of e: they are found again when e is stored again.
func (c *core) orphan(e uint32) {
	recs := c.recs.All
	for child := recs[e].child; child != none; {
		next := recs[child].next
		recs[child].prev, recs[child].next = none, none
		child = next
	}
	recs[e].child = none
}
