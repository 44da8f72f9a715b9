package dram

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// Limits of the work of one reservation under the lock. If they do not suffice, it is Busy.
const (
	maxRepairs = 16 << 10 // entries moved in the order of eviction
	nearOldest = 64       // oldest entries among which one with the wanted class is searched first
	farOldest  = 4 << 10  // ... and if no slab could be taken
	maxOwned   = 16 << 10 // steps in the order of the entries of an owner at its budget
	// entries evicted because of a budget; more than a part of a batch needs, so that an owner
	// whose budget was lowered gets there
	maxOwnedOut = 2 * lockStride
)

// work is what is left of those limits.
type work struct {
	repairs         int
	owned, ownedOut int    // see maxOwned
	steps           int    // see maxSteps
	taken           int    // slabs taken from other classes: one part of a reservation ends with it
	noSlab          bool   // none could be taken
	passed          bool   // the repairs went for pinned entries, which the next part does not meet
	sink            uint64 // keeps loads alive that only warm the caches
}

func (w *work) refill() {
	w.repairs, w.steps = maxRepairs, maxSteps
	w.owned, w.ownedOut = maxOwned, maxOwnedOut
	w.taken, w.noSlab, w.passed = 0, false, false
}

// makeRoom evicts until there is a slot of each of these classes, or a free slab to cut. It returns
// false if nothing more can be evicted.
func (c *core) makeRoom(classes []int32) bool {
	for class := c.slabs.lacking(classes); class != noClass; class = c.slabs.lacking(classes) {
		if !c.reclaimPartial() && !c.evictFor(class) {
			return false
		}
	}
	return true
}

// evictFor evicts an entry with a slot of the class, if one of the oldest entries has one: the
// policy's choice, or that one without a policy. Otherwise it takes a slab of another class.
func (c *core) evictFor(class int32) bool {
	oldest := c.oldest()
	e := c.oldestOf(class, oldest, nearOldest)
	if e == none && oldest != none && !c.asOld(class, oldest) && c.takeSlab(class) {
		return true
	}
	if advised := c.advised(class); advised != none {
		e = advised
	} else if c.refused {
		return false
	} else if e == none {
		e = c.oldestOf(class, oldest, farOldest)
	}
	if e == none {
		return oldest != none && c.takeSlab(class)
	}
	c.evict(e, pool.ByEviction)
	return true
}

// asOld reports whether some entry of a class is about as old as those that would be evicted with a
// slab of another class. Such classes leave each other their slabs. Once true, the result holds for
// nearOldest calls.
func (c *core) asOld(class int32, oldest uint32) bool {
	if int(class) >= len(c.foundOld) {
		c.foundOld = append(c.foundOld, make([]int, int(class)+1-len(c.foundOld))...)
	}
	if c.foundOld[class] > 0 {
		c.foundOld[class]--
		return true
	}
	donor := c.group(c.recs.All[oldest].ident).classes[0]
	if c.oldestOf(class, oldest, min(int(c.slabs.class[donor].perSlab), farOldest)) == none {
		return false
	}
	c.foundOld[class] = nearOldest - 1
	return true
}

// evictable reports whether an entry is not held and has no children: a suffix goes first.
func (c *core) evictable(e uint32) bool { return c.recs.All[e].child == none && !c.held(e) }

// oldest returns the next entry to evict: the least recently used one without children. An older
// entry with children counts as recent as they are.
func (c *core) oldest() uint32 {
	for c.work.repairs > 0 {
		e := c.unpinned(c.recent.oldest)
		if e == none || c.evictable(e) {
			return e
		}
		c.lift(e)
	}
	return none
}

// unpinned returns the first entry from one on in the order of eviction that is not pinned. Those
// before it leave the order until their last pin ends, so that they are passed over once.
func (c *core) unpinned(e uint32) uint32 {
	for e != none && c.recs.All[e].pins() > 0 && c.work.repairs > 0 {
		newer := c.recs.All[e].newer
		c.recent.remove(c.recs.All, e)
		c.work.repairs--
		c.work.passed = c.work.repairs == 0
		e = newer
	}
	return e
}

// lift moves e just above a child of it, the child above one of its own, and so on down to one that
// was lifted before, so each chain that was stored in parts from its beginning is put in order
// once. An entry whose child is held is in use, and becomes the most recent.
func (c *core) lift(e uint32) {
	recs := c.recs.All
	path := append(c.scratch[:0], e)
	for child := recs[e].child; child != none && recs[child].is(flagRecent) && !c.held(child) &&
		len(path) < maxRepairs; child = recs[child].child {
		path = append(path, child)
		if recs[child].is(flagLifted) {
			break
		}
	}
	c.work.repairs -= len(path)
	if len(path) == 1 {
		c.recent.remove(recs, e)
		c.recent.push(recs, e)
	}
	for i := len(path) - 2; i >= 0; i-- {
		c.recent.remove(recs, path[i])
		c.recent.pushAbove(recs, path[i+1], path[i])
		recs[path[i]].hold |= flagLifted
	}
	c.scratch = path[:0]
}

// oldestOf returns the first evictable entry with a slot of the class of n entries from one on.
func (c *core) oldestOf(class int32, from uint32, n int) uint32 {
	recs := c.recs.All
	for e := c.unpinned(from); e != none && n > 0; e, n = c.unpinned(recs[e].newer), n-1 {
		if c.evictable(e) && slices.Contains(c.group(recs[e].ident).classes, class) {
			return e
		}
	}
	return none
}

func (c *core) evict(e uint32, why pool.Cause) {
	c.stats.Evicted++
	c.stats.EvictedBytes += uint64(c.group(c.recs.All[e].ident).bytes)
	c.drop(e, why)
}

// reclaimPartial evicts the oldest partial entry. What follows it was not found anyway.
func (c *core) reclaimPartial() bool {
	e := c.partial.oldest
	if e != none && c.held(e) { // it is about to get a child
		e = c.recs.All[e].newer
	}
	if e == none {
		return false
	}
	c.evict(e, pool.ByAge)
	return true
}

// An entry is a child of the entry of the block before it. Nothing that has children is evicted.
// The links never form a cycle, whose entries could never be evicted.

// maxSteps bounds the steps of walks that prove the absence of cycles, for one batch under the
// lock; beyond it no links are made.
const maxSteps = 16 << 10

// link makes child a child of parent, if it has no parent and no cycle results.
func (c *core) link(child, parent uint32) {
	r := &c.recs.All[child]
	if r.prev != none || child == parent || r.child != none && !c.surelyApart(child, parent) {
		return
	}
	c.linkRoot(child, parent)
	c.persistParent(child, parent)
}

// surelyApart reports whether child, a root, is proven not to be an ancestor of parent.
func (c *core) surelyApart(child, parent uint32) bool {
	root := c.root(parent)
	return root != none && root != child
}

// root returns the first ancestor of e, or e itself; none if that takes too many steps.
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
