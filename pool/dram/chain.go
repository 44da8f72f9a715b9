package dram

// An entry is a child of the entry of the block before it. Nothing that has children is evicted.
// The links never form a cycle, whose entries could never be evicted.

// maxSteps bounds the steps of walks that prove the absence of cycles, for one batch under the
// lock; beyond it no links are made.
const maxSteps = 16 << 10

// link makes child a child of parent, if it has no parent and no cycle results.
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

// surelyApart reports whether child, a root, is proven not to be an ancestor of parent.
func (c *core) surelyApart(child, parent uint32) bool {
	root := c.root(parent)
	return root != none && root != child
}

// root returns the first ancestor of e, e itself if it has none, or none if that takes too many
// steps.
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

// maxSiblings bounds the siblings passed on the way to a parent.
const maxSiblings = 16

// parent returns the parent of e; none if it has none, or if it has too many younger siblings.
func (c *core) parent(e uint32) uint32 {
	for range maxSiblings {
		e = c.recs.All[e].prev
		if e == none || e&upward != 0 {
			return e &^ upward
		}
	}
	return none
}

// unlink removes e from the children of its parent.
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

// orphan makes the children of e roots. They are linked again once e is stored again.
func (c *core) orphan(e uint32) {
	recs := c.recs.All
	for child := recs[e].child; child != none; {
		next := recs[child].next
		recs[child].prev, recs[child].next = none, none
		child = next
	}
	recs[e].child = none
}
