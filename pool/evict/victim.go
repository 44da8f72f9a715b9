package evict

import (
	"iter"
	"math"
	"math/bits"

	"github.com/kvagent/kvagent/pool"
)

const (
	unrefusing  = 300      // look-ups before the first refusal
	maxSteps    = 16 << 10 // entries that one call of Victim looks at; then it takes what follows the last
	parkedACall = 2        // parked runs of a kind that one call of Victim looks at first
)

var inf = float32(math.Inf(1))

// Victim implements advisor.Policy. An entry with a child is worth as much as the child, which goes
// first: it follows the child in its run. An entry in use is parked.
func (h *Hazard) Victim(now int64, kinds uint64, print uint64, v pool.View) uint32 {
	t := h.clock.advance(now)
	incoming := inf
	if g := h.ghosts.find(print); g != nil && print != 0 && h.seen >= unrefusing {
		s := g.state()
		incoming = h.worth(&s)
	}
	h.unpark(kinds, t, v)
	e := uint32(0)
	for range maxSteps {
		k, c := h.worst(kinds)
		if k == nil {
			return h.anyParked(kinds, v)
		}
		if incoming < k.least[c] {
			h.refused++
			return pool.Refused
		}
		e = h.runs.at(k.lists[c].oldest).entries.oldest
		child := v.Child(e)
		if child == 0 && !v.Held(e) {
			return e
		}
		n, x := h.nodes.at(e), h.find(child)
		if x != nil && x.run == n.run {
			h.take(child, x)
			h.join(child, x, n.run, 0)
			continue
		}
		r := h.runs.at(n.run)
		kind, s := r.kind, r.state
		h.take(e, n)
		if x != nil {
			h.join(e, n, x.run, child)
			continue
		}
		h.put(e, n, kind, parked, s)
	}
	for child := v.Child(e); child != 0; child = v.Child(e) {
		e = child
	}
	if v.Held(e) || h.find(e) == nil {
		return 0
	}
	return e
}

// worst returns the class with the least worth; nil if the kinds have no entries but parked ones.
func (h *Hazard) worst(kinds uint64) (worst *kind, class uint16) {
	least := inf
	for k := range h.each(kinds) {
		for c := k.winner[1]; ; c = k.winner[1] {
			if h.settle(k, c); k.winner[1] == c {
				break // it is as old as it is now
			}
		}
		if c := k.winner[1]; k.least[c] < least {
			worst, class, least = k, c, k.least[c]
		}
	}
	return worst, class
}

// unpark returns the entries that were parked first to their class if they are not in use any more.
// They were used until now.
func (h *Hazard) unpark(kinds uint64, now uint32, v pool.View) {
	for k := range h.each(kinds) {
		for range parkedACall {
			id := k.lists[parked].oldest
			if id == 0 {
				break
			}
			r := h.runs.at(id)
			h.unlink(id)
			first := r.entries.oldest
			if child := v.Child(first); child == 0 && !v.Held(first) || h.find(child) != nil {
				r.list, r.used, r.bin = r.class, now, 0
			}
			h.link(id)
		}
	}
}

// anyParked returns a parked entry that can be evicted.
func (h *Hazard) anyParked(kinds uint64, v pool.View) uint32 {
	left := maxSteps
	for k := range h.each(kinds) {
		for id := k.lists[parked].oldest; id != 0; id = h.runs.at(id).newer {
			for e := h.runs.at(id).entries.oldest; e != 0; e = h.nodes.at(e).newer {
				if v.Child(e) == 0 && !v.Held(e) {
					return e
				}
				if left--; left == 0 {
					return 0
				}
			}
		}
	}
	return 0
}

// each returns the kinds whose bit is set and that had entries.
func (h *Hazard) each(kinds uint64) iter.Seq[*kind] {
	return func(yield func(*kind) bool) {
		for i := range kindsIn(kinds) {
			if i < len(h.kinds) && h.kinds[i] != nil && !yield(h.kinds[i]) {
				return
			}
		}
	}
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
