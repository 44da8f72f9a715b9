package evict

import (
	"math/bits"

	"github.com/kvagent/kvagent/pool"
)

const maxSteps = 16 << 10 // entries that one call of Victim looks at

// Victim implements pool.Policy. Of several kinds, it evicts from the one whose oldest block in LRU
// was used least recently.
func (h *Hazard) Victim(now int64, kinds uint64, v pool.View) uint32 {
	t := h.clock.advance(now)
	h.passing.begin(t)
	h.victim = 0
	for left := maxSteps; left > 0 && h.victim == 0; {
		i := h.eldest(kinds)
		if i < 0 {
			break
		}
		h.victim, left = h.victimOf(h.kinds[i], t, v, left)
		kinds &^= 1 << i
	}
	return h.victim
}

// eldest returns the kind with entries whose oldest block in LRU was used least recently; -1 if
// there is none.
func (h *Hazard) eldest(kinds uint64) (eldest int) {
	if len(h.kinds) == 1 && kinds&1 != 0 && h.entries > 0 {
		return 0 // with nothing to compare, the oldest block need not be read
	}
	eldest = -1
	age := uint32(0)
	for m := kinds; m != 0; m &= m - 1 {
		i := bits.TrailingZeros64(m)
		if i >= len(h.kinds) || h.kinds[i] == nil || h.kinds[i].entries == 0 {
			continue
		}
		if a := h.idle(h.kinds[i]); eldest < 0 || a > age {
			eldest, age = i, a
		}
	}
	return eldest
}

// idle returns the ms since the oldest block of LRU was used, or more.
func (h *Hazard) idle(k *kind) uint32 { return uint32(h.clock.now) - k.recency.cutoff() }

// victimOf returns the oldest entry of the cell with the least worth, or the end of a chain below
// it. If no more blocks may be lost, the victim is one that LRU would not have; if there is none,
// LRU drops its oldest blocks first. Entries whose chain is too long or held at its end are in use:
// they become the newest of their classes, so each is passed over once.
func (h *Hazard) victimOf(k *kind, now uint32, v pool.View, steps int) (victim uint32, left int) {
	masks, deviate := false, h.mayDeviate()
	for left = steps; left > 0; left-- {
		h.trim(k, k.entries-1+k.spare)
		half, c, e := k.lowest(&h.nodes.runs, deviate)
		if e == 0 && deviate {
			break
		}
		if e == 0 {
			deviate = !h.drop(k)
			k.cross(&h.nodes.runs, &h.worths, false)
			continue
		}
		end, walked := h.end(e, v, left)
		left -= walked
		if victim = end; end != 0 || left <= 0 {
			break
		}
		passed := h.passOver(k, now)
		left -= passed
		switch {
		case passed > 0:
		case !deviate: // all were passed over already
			deviate = true // the others are as young, and some may be evicted
		default:
			half.masked[c] |= 1
			masks = true
			half.settle(c, &h.worths[c])
		}
	}
	if victim == 0 && left > 0 && masks {
		victim = h.anyEnd(k, v, left/2) // other kinds have the rest
		left -= left / 2
	}
	if masks {
		h.unmask(k)
	}
	return victim, left
}

// anyEnd returns the end of a chain among the masked entries, the newest first, examining at most
// steps. Entries in use are the newest of their class, except for blocks used in the same ms and
// for those that were released since.
func (h *Hazard) anyEnd(k *kind, v pool.View, steps int) uint32 {
	for c := range numClasses {
		if k.half[young].masked[c] == 0 {
			continue
		}
		for id := k.newest[c]; id != 0; {
			r := h.nodes.runs.at(id)
			if r.half != young || r.bin != 0 {
				break
			}
			for e := r.last; e != 0; e = h.nodes.at(e).older {
				if v.Child(e) == 0 && !v.Held(e) {
					return e
				}
				if steps--; steps <= 0 {
					return 0
				}
			}
			id = r.older
		}
	}
	return 0
}

// passing is the ms in which entries in use are passed over, once each.
type passing struct {
	now  uint32
	mark uint16 // of the ms, never 0. Once it wraps, a few entries are taken for passed over that were not
}

func (p *passing) begin(now uint32) {
	if p.now == now && p.mark != 0 {
		return
	}
	p.now = now
	if p.mark++; p.mark == 0 {
		p.mark = 1
	}
}

// passOver makes the entries of the descent to a held end the newest of their classes, and returns
// how many were not passed over before in this ms. Of the chain looked up last, only the blocks of
// the newest ms move.
func (h *Hazard) passOver(k *kind, now uint32) (passed int) {
	step := k.recency.step(len(h.descent))
	for i := len(h.descent) - 1; i >= 0; i-- {
		e := h.descent[i]
		n := h.nodes.at(e)
		if n.passed == h.passing.mark {
			continue
		}
		n.passed = h.passing.mark
		passed++
		r := h.nodes.runOf(n)
		if r.bin == 0 && k.recency.justLooked(r.used) {
			continue
		}
		if r.bin != 0 {
			h.tables.enter(r.class, -1, 0, 1)
		}
		h.refresh(e, n, r.class, k.recency.notBefore(now-uint32(i/step)))
	}
	return passed
}

// lowest returns the entry to evict if it is not held and has no children; 0 if there is none.
// Unless deviate is set, it is one that LRU would not have.
func (k *kind) lowest(r *runs, deviate bool) (half *cells, c int, e uint32) {
	half = &k.half[old]
	c = int(half.winner[1])
	if young := &k.half[young]; deviate && young.worst[young.winner[1]] < half.worst[c] {
		half, c = young, int(young.winner[1])
	}
	if half.worst[c] == inf {
		return half, c, 0
	}
	return half, c, r.at(half.first[c][half.low[c]].run).first
}

func (h *Hazard) unmask(k *kind) {
	for i := range k.half {
		half := &k.half[i]
		for c := range half.masked {
			if half.masked[c] != 0 {
				half.masked[c] = 0
				half.settle(c, &h.worths[c])
			}
		}
	}
}

// maxDescent bounds the entries of a descent; an entry farther from the end of its chain is in use.
const maxDescent = 64 << 10

// descent is the path from an entry down to the end of a chain, kept from one eviction to the next:
// a chain is evicted from its end, and walking down again for each block would take quadratic time.
type descent []uint32

// end returns the last entry of a chain through e; 0 if that is held, unknown, too far, after an
// entry passed over in this ms, or not reached in the steps allowed. A later call continues.
func (h *Hazard) end(e uint32, v pool.View, allowed int) (end uint32, steps int) {
	if len(h.descent) == 0 || h.descent[0] != e {
		if v.Child(e) == 0 && !v.Held(e) {
			return e, 0 // most are ends themselves
		}
		h.ascend(0)
		h.descend(e)
	}
	for ; steps < allowed; steps++ {
		e = h.descent[len(h.descent)-1]
		child := v.Child(e)
		if child == 0 && !v.Held(e) {
			return e, steps
		}
		if child == 0 || len(h.descent) == maxDescent {
			return 0, steps
		}
		if n := h.nodes.find(child); n == nil || n.passed == h.passing.mark {
			return 0, steps
		}
		h.descend(child)
	}
	return 0, steps
}

func (h *Hazard) descend(e uint32) {
	h.descent = append(h.descent, e)
	h.nodes.at(e).state |= stateDescent
}

// ascend cuts the descent at its n-th entry.
func (h *Hazard) ascend(n int) {
	for _, e := range h.descent[n:] {
		h.nodes.at(e).state &^= stateDescent
	}
	h.descent = h.descent[:n]
}

// leaveDescent cuts the descent at an entry.
func (h *Hazard) leaveDescent(e uint32) {
	n := len(h.descent) - 1
	for n > 0 && h.descent[n] != e {
		n--
	}
	h.ascend(n)
}
