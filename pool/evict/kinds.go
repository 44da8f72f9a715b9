package evict

import (
	"iter"
	"math/bits"
)

// kind are the entries of one kind: the young, which LRU with as much room would have, and the old, which it would not.
type kind struct {
	newest  [numClasses]uint32 // run: the old ones of a class follow the young ones
	half    [2]cells           // young, old. What is young may be old by its time, until all behind it is
	entries int
	gone    [numClasses]uint64 // entries that went
	recency recency
}

// The halves of a kind.
const (
	young = 0
	old   = 1
)

// quantum is the ms between uses that make no difference: a class' entries that were used so near to each other are one run.
const quantum = 500

func newKind() *kind {
	k := &kind{}
	k.half[young].init()
	k.half[old].init()
	k.recency.init()
	return k
}

// put makes an entry the newest of class c, young, used at a time, in bin 0. It may have been used a little before the one before it, as the end of a
// chain that is stored when its start was used; lists are by the time things are told. What it gives is the time it is taken to be used at.
func (k *kind) put(t *nodes, w *[numClasses]worths, e uint32, n *node, c uint8, used uint32) uint32 {
	cells := &k.half[young]
	cells.keep(int(c), 1)
	id := k.newest[c]
	if id != 0 {
		r := t.runs.at(id)
		if r.half == young && r.bin == 0 && r.count < maxRun && k.alike(r.used, used) {
			n.run, n.newer, n.older = id, 0, r.last
			t.at(r.last).newer = e
			r.last = e
			r.count++
			return r.used
		}
	}
	next := t.runs.number()
	if id != 0 {
		t.runs.at(id).newer = next
	}
	r := t.runs.at(next)
	r.used, r.newer, r.older, r.first, r.last, r.count, r.class, r.bin, r.half = used, 0, id, e, e, 1, c, 0, young
	n.run, n.newer, n.older = next, 0, 0
	k.newest[c] = next
	cells.append(w, next, r)
	return used
}

// alike says that it makes no difference at which of two times something was used.
func (k *kind) alike(a, b uint32) bool {
	since := int32(a - b)
	return since == 0 || since <= quantum && since >= -quantum && !before(a, k.recency.newest()) && !before(b, k.recency.newest())
}

// take removes an entry from its run.
func (k *kind) take(t *nodes, w *[numClasses]worths, n *node) {
	r := t.runOf(n)
	cells := &k.half[r.half]
	cells.keep(int(r.class), -1)
	if r.count--; r.count == 0 {
		cells.leave(&t.runs, w, n.run, r)
		k.unlink(&t.runs, n.run, r)
		return
	}
	if n.newer != 0 {
		t.at(n.newer).older = n.older
	} else {
		r.last = n.older
	}
	if n.older != 0 {
		t.at(n.older).newer = n.newer
	} else {
		r.first = n.newer
	}
}

// unlink gives back a run that is empty.
func (k *kind) unlink(t *runs, id uint32, r *run) {
	if r.newer != 0 {
		t.at(r.newer).older = r.older
	} else {
		k.newest[r.class] = r.older
	}
	if r.older != 0 {
		t.at(r.older).newer = r.newer
	}
	t.giveBack(id)
}

// cross makes old what LRU has no more.
func (k *kind) cross(t *runs, w *[numClasses]worths) {
	cutoff, from, to := k.recency.cutoff(), &k.half[young], &k.half[old]
	for m := from.full; m != 0; m &= m - 1 {
		c := bits.TrailingZeros64(m)
		for from.filled[c] != 0 {
			at := from.first[c][bits.Len64(from.filled[c])-1]
			if !before(at.used, cutoff) {
				break
			}
			r := t.at(at.run)
			from.leave(t, w, at.run, r)
			from.keep(c, -int32(r.count))
			r.half = old
			to.keep(c, int32(r.count))
			to.append(w, at.run, r)
		}
	}
}

// kind makes a kind when its first entry comes.
func (h *Hazard) kind(kind uint8) *kind {
	for len(h.kinds) <= int(kind) {
		h.kinds = append(h.kinds, nil)
	}
	if h.kinds[kind] == nil {
		h.kinds[kind] = newKind()
	}
	return h.kinds[kind]
}

// kindsIn are the kinds whose bit is set.
func kindsIn(mask uint64) iter.Seq[int] {
	return func(yield func(int) bool) {
		for ; mask != 0; mask &= mask - 1 {
			if !yield(bits.TrailingZeros64(mask)) {
				return
			}
		}
	}
}
