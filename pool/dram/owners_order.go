package dram

import "github.com/kvagent/kvagent/pool"

// usedSteps is the price of passing over an entry in use, which later calls meet again. A chain is
// put in order once, for a step of each entry.
const usedSteps = 4

// victim returns the least recently used of the owner's entries that is neither held nor has
// children; 0 if there is none, or if the steps do not suffice, of which it takes those that it
// needs. The entries that it passes over are moved up, so a later call continues. An entry that can
// be evicted is never moved, so there is none once an entry that became the newest is the oldest.
func (t *ownerTable) victim(o pool.Owner, v pool.View, steps *int) uint32 {
	at := &t.owners[o]
	for first := uint32(0); ; {
		e := at.oldest
		switch {
		case e == 0 || v.Child(e) == 0 && !v.Held(e):
			return e
		case e == first || *steps <= 0:
			return 0
		}
		*steps -= t.lift(e, v)
		if first == 0 && at.newest == e {
			first = e
		}
	}
}

// maxPath bounds the entries that one lift moves, by which it may exceed the steps. Beyond it, a
// chain is put in order in parts, each of which moves those before it again.
const maxPath = 16 << 10

// lift moves an entry with children just above one of them, that one above one of its own, and so
// on down to one that was lifted before, so each chain that was stored in parts from its beginning
// is put in order once. An entry that is held, or whose child is held or another owner's, is in
// use, and becomes the most recent. It returns the steps taken.
func (t *ownerTable) lift(e uint32, v pool.View) int {
	path := append(t.path[:0], e)
	for end := e; !v.Held(e) && len(path) < maxPath; {
		if end = v.Child(end); !t.together(e, end) || v.Held(end) {
			break
		}
		if path = append(path, end); t.links.All[end].lifted {
			break
		}
	}
	t.path = path[:0]
	if len(path) == 1 {
		t.use(e, 0)
		return usedSteps
	}
	for i := len(path) - 2; i >= 0; i-- {
		t.remove(path[i])
		t.insert(path[i], t.links.All[path[i+1]].newer)
		t.links.All[path[i]].lifted = true
	}
	return len(path)
}

// together reports whether an entry is in the order of the same owner as another one.
func (t *ownerTable) together(e, other uint32) bool {
	if other == 0 || int(other) >= t.high {
		return false
	}
	a, b := &t.links.All[e], &t.links.All[other]
	return b.listed && a.owner == b.owner && a.term == b.term
}

// insert makes an entry the newest, or the one just older than above, if that is in the same order.
func (t *ownerTable) insert(e, above uint32) {
	if above != e && t.together(e, above) {
		t.insertBelow(e, above)
		return
	}
	l := &t.links.All[e]
	at := &t.owners[l.owner]
	l.newer, l.older, l.listed = 0, at.newest, true
	if at.newest != 0 {
		t.links.All[at.newest].newer = e
	} else {
		at.oldest = e
	}
	at.newest = e
}

func (t *ownerTable) insertBelow(e, above uint32) {
	l, a := &t.links.All[e], &t.links.All[above]
	l.newer, l.older, l.listed = above, a.older, true
	if a.older != 0 {
		t.links.All[a.older].newer = e
	} else {
		t.owners[l.owner].oldest = e
	}
	a.older = e
}

func (t *ownerTable) remove(e uint32) {
	l := &t.links.All[e]
	at := &t.owners[l.owner]
	if l.newer != 0 {
		t.links.All[l.newer].older = l.older
	} else {
		at.newest = l.older
	}
	if l.older != 0 {
		t.links.All[l.older].newer = l.newer
	} else {
		at.oldest = l.newer
	}
	l.newer, l.older, l.listed, l.lifted = 0, 0, false, false
}
