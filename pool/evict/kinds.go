package evict

import (
	"iter"
	"math/bits"
)

// kind are the entries of one kind: young ones, which LRU with the same room would have, and old
// ones, which it would not have.
type kind struct {
	newest  [numClasses]uint32 // run: the old ones of a class follow the young ones
	half    [2]cells           // young, old; a young run may be old by its time until all runs after it are
	entries int
	removed [numClasses]uint64 // entries that went
	recency recency
	spare   int // blocks of LRU that the look-up has to store; LRU needs no room for them
}

// maxBack bounds the runs skipped to insert an entry: those of the longest chain, and some of
// others. An entry with an earlier use is out of order and becomes old a little late.
const maxBack = mostSteps + 64

// The halves of a kind.
const (
	young = 0
	old   = 1
)

// quantum is the ms within which uses count as simultaneous: entries of a class that were used so
// closely together are one run.
const quantum = 500

func newKind(now uint32) *kind {
	k := &kind{}
	k.half[young].init()
	k.half[old].init()
	k.recency.restart(now)
	return k
}

// putLast are, by class, the runs in which entries of one Insert were put last; each is used later
// than those before it.
type putLast [numClasses]uint32

// fewPut is a number of entries so small that each searches for its place.
const fewPut = 8

// put makes an entry one of the newest of class c, young, in bin 0, and returns the time that its
// use counts as. An entry with a slightly earlier use, such as the end of a chain, is put after
// later ones.
func (k *kind) put(t *nodes, w *[numClasses]worths, e uint32, n *node, c uint16, used uint32, last *putLast) uint32 {
	k.half[young].keep(int(c), 1)
	newer, older := k.position(&t.runs, c, used, last)
	if older != 0 {
		if r := t.runs.at(older); r.half == young && r.bin == 0 && r.count < maxRun && k.alike(r.used, used) {
			n.run, n.newer, n.older = older, 0, r.last
			t.at(r.last).newer = e
			r.last = e
			r.count++
			last.note(c, older)
			return r.used
		}
	}
	id := t.runs.alloc()
	n.run, n.newer, n.older = id, 0, 0
	r := t.runs.at(id)
	r.used, r.first, r.last, r.count, r.class, r.bin, r.half = used, e, e, 1, c, 0, young
	k.link(&t.runs, w, id, r, newer, older)
	last.note(c, id)
	return used
}

func (l *putLast) note(c uint16, run uint32) {
	if l != nil {
		l[c] = run
	}
}

// position returns the place of a use in the list of a class: before the run of last, or else
// before the newest run that was used no later, or is not in bin 0, or is too far away.
func (k *kind) position(t *runs, c uint16, used uint32, last *putLast) (newer, older uint32) {
	if last != nil && last[c] != 0 {
		older = last[c]
		for newer = t.at(older).newer; newer != 0 && !before(used, t.at(newer).used); newer = t.at(newer).newer {
			older = newer
		}
		return newer, older
	}
	older = k.newest[c]
	for range maxBack {
		if older == 0 {
			break
		}
		r := t.at(older)
		if r.half != young || r.bin != 0 || !before(used, r.used) {
			break
		}
		newer, older = older, r.older
	}
	return newer, older
}

// link inserts a run of bin 0 between two others of its class; 0 is none.
func (k *kind) link(t *runs, w *[numClasses]worths, id uint32, r *run, newer, older uint32) {
	r.newer, r.older = newer, older
	if newer != 0 {
		t.at(newer).older = id
	} else {
		k.newest[r.class] = id
	}
	if older != 0 {
		x := t.at(older)
		x.newer = id
		if x.half == young && x.bin == 0 {
			return
		}
	}
	k.half[young].begin(w, id, r)
}

// alike reports whether two times of use count as simultaneous.
func (k *kind) alike(a, b uint32) bool {
	since := int32(a - b)
	return since == 0 || since <= quantum && since >= -quantum && !before(a, k.recency.newest()) &&
		!before(b, k.recency.newest())
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

// unlink frees an empty run.
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

// cross makes the entries old that LRU no longer has, or all.
func (k *kind) cross(t *runs, w *[numClasses]worths, all bool) {
	cutoff, from, to := k.recency.cutoff(), &k.half[young], &k.half[old]
	for c := range numClasses {
		for from.filled[c] != 0 {
			at := from.first[c][bits.Len64(from.filled[c])-1]
			if !all && !before(at.used, cutoff) {
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

// kind returns a kind, and makes it for its first entry.
func (h *Hazard) kind(kind uint8, now uint32) *kind {
	for len(h.kinds) <= int(kind) {
		h.kinds = append(h.kinds, nil)
	}
	if h.kinds[kind] == nil {
		h.kinds[kind] = newKind(now)
	}
	return h.kinds[kind]
}

// kindsIn returns the kinds whose bit is set.
func kindsIn(mask uint64) iter.Seq[int] {
	return func(yield func(int) bool) {
		for ; mask != 0; mask &= mask - 1 {
			if !yield(bits.TrailingZeros64(mask)) {
				return
			}
		}
	}
}
