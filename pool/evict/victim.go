package evict

import (
	"math/bits"

	"github.com/kvagent/kvagent/pool"
)

const (
	maxSteps = 16 << 10
)

// Victim implements pool.Policy: the oldest entry of the cell that is worth least, or, if others hang on it, the end
// of one of their chains. An entry that is held, or whose chain is too long or held at its end, is in use: it becomes
// the newest of its class, so that each is passed over once.
func (h *Hazard) Victim(now int64, kinds uint64, v pool.View) uint32 {
	t := h.clock.hear(now)
	victim := uint32(0)
	masks, bold := false, h.bold()
	for steps := 0; steps < maxSteps; steps++ {
		k, c, e := h.next(kinds, bold)
		if e == 0 {
			break
		}
		end, walked := h.end(e, v, maxSteps-steps)
		steps += walked
		if victim = end; end != 0 || steps >= maxSteps {
			break
		}
		n := h.nodes.at(e)
		if n.bin == 0 && n.used == t { // passed over already
			if !bold {
				bold = true // all others are as young, and some of them may go
				continue
			}
			k.masked[c] |= 1
			masks = true
			k.settle(c, &h.worths[c])
			continue
		}
		k.take(&h.nodes, &h.worths, e, n)
		h.tables.enter(n.class, -1, 0)
		k.put(&h.nodes, &h.worths, e, n, n.class, t)
	}
	if masks {
		h.unmask(kinds)
	}
	return victim
}

// next is the entry that would go if nobody held it nor anything behind it.
func (h *Hazard) next(kinds uint64, bold bool) (k *cells, c int, e uint32) {
	if !bold {
		return h.eldest(kinds)
	}
	if k, c = h.lowest(kinds); k == nil {
		return nil, 0, 0
	}
	return k, c, k.first[c][k.low[c]].entry
}

// lowest is the class with the cell that is worth least, over some kinds; nil if they have no entries.
func (h *Hazard) lowest(kinds uint64) (k *cells, c int) {
	worth := inf
	for m := kinds; m != 0; m &= m - 1 {
		i := bits.TrailingZeros64(m)
		if i >= len(h.kinds) {
			break
		}
		if o := h.kinds[i]; o != nil {
			if w := int(o.winner[1]); o.worst[w] < worth {
				k, c, worth = o, w, o.worst[w]
			}
		}
	}
	return k, c
}

func (h *Hazard) unmask(kinds uint64) {
	for i, k := range h.kinds {
		if k == nil || kinds>>i&1 == 0 {
			continue
		}
		for c := range k.masked {
			if k.masked[c] != 0 {
				k.masked[c] = 0
				k.settle(c, &h.worths[c])
			}
		}
	}
}
