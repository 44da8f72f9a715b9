package evict

import (
	"math/bits"

	"github.com/kvagent/kvagent/pool"
)

const maxSteps = 16 << 10 // entries that one call of Victim looks at

// Victim implements pool.Policy. Of several kinds the one goes first whose oldest block LRU used
// least recently.
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

// eldest is the kind, of those with entries, whose oldest block in LRU was used least recently; -1
// if there is none.
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

// idle is the ms since the oldest block of LRU was used, or longer.
func (h *Hazard) idle(k *kind) uint32 { return uint32(h.clock.now) - k.recency.cutoff() }

// victimOf is the oldest entry of the cell that is worth least, or, if others hang on it, the end
// of one of their chains. If no more may be lost, one goes that LRU would not have; where there is
// none, LRU gives its oldest blocks up first. Entries whose chain is too long or held at its end
// are in use: they become the newest of their classes, so that each is passed over once.
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
		case !deviate: // passed over already
			deviate = true // all others are as young, and some of them may go
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

// anyEnd is the end of a chain among those that were masked: what is in use is the newest of its
// class but for blocks that were used in the same ms, and for what was let go since. The newest are
// looked at first, as many as there are steps.
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

// passing is the ms in which entries in use are passed over, each once.
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

// passOver makes what is on the way to the end of a chain in use the newest of its classes, and
// gives the number of entries for which that was to be done. The chain looked up last stays as it
// is, but for the blocks of its newest ms.
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

// lowest is the entry that would go if nobody held it nor anything behind it; 0 if there is none.
// If not bold, it is one that LRU would not have.
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

// maxDescent bounds the entries on the way from an entry to the end of its chain; one that is farther
// from it is in use.
const maxDescent = 64 << 10

// way is the way from an entry down to the end of a chain, kept from one eviction to the next: a
// chain goes from its end on, and to walk down a long one for each of its blocks would take the
// square of its length.
type descent []uint32

// end is the last entry of a chain that goes through e; 0 if it is held, unknown, too far, behind
// one that was passed over in this ms, or not reached in the steps allowed. A later call goes on
// where this one ended.
func (h *Hazard) end(e uint32, v pool.View, allowed int) (end uint32, steps int) {
	if len(h.descent) == 0 || h.descent[0] != e {
		if v.Child(e) == 0 && !v.Held(e) {
			return e, 0 // most have no way to go
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

// leaveWay forgets the way from its n-th entry on.
func (h *Hazard) ascend(n int) {
	for _, e := range h.descent[n:] {
		h.nodes.at(e).state &^= stateDescent
	}
	h.descent = h.descent[:n]
}

// offWay forgets the way from an entry on.
func (h *Hazard) leaveDescent(e uint32) {
	n := len(h.descent) - 1
	for n > 0 && h.descent[n] != e {
		n--
	}
	h.ascend(n)
}
