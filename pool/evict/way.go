package evict

import "github.com/kvagent/kvagent/pool"

// maxWay bounds the entries on the way from an entry to the end of its chain; one that is farther from it is in use.
const maxWay = 64 << 10

// way is the way from an entry down to the end of a chain, kept from one eviction to the next: a chain goes from its
// end on, and to walk down a long one for each of its blocks would take the square of its length.
type way []uint32

// end is the last entry of a chain that goes through e; 0 if it is held, unknown, too far, behind one that was passed over in this ms, or not
// reached in the steps allowed. A later call goes on where this one ended.
func (h *Hazard) end(e uint32, v pool.View, allowed int) (end uint32, steps int) {
	if len(h.way) == 0 || h.way[0] != e {
		if v.Child(e) == 0 && !v.Held(e) {
			return e, 0 // most have no way to go
		}
		h.leaveWay(0)
		h.onWay(e)
	}
	for ; steps < allowed; steps++ {
		e = h.way[len(h.way)-1]
		child := v.Child(e)
		if child == 0 && !v.Held(e) {
			return e, steps
		}
		if child == 0 || len(h.way) == maxWay {
			return 0, steps
		}
		if n := h.nodes.known(child); n == nil || n.passed == h.passing.mark {
			return 0, steps
		}
		h.onWay(child)
	}
	return 0, steps
}

func (h *Hazard) onWay(e uint32) {
	h.way = append(h.way, e)
	h.nodes.at(e).state |= stateOnWay
}

// leaveWay forgets the way from its n-th entry on.
func (h *Hazard) leaveWay(n int) {
	for _, e := range h.way[n:] {
		h.nodes.at(e).state &^= stateOnWay
	}
	h.way = h.way[:n]
}

// offWay forgets the way from an entry on.
func (h *Hazard) offWay(e uint32) {
	n := len(h.way) - 1
	for n > 0 && h.way[n] != e {
		n--
	}
	h.leaveWay(n)
}
