package evict

import "math/bits"

const (
	crossingsABlock = 8  // entries that change their bin per block looked up, at most
	minCrossings    = 64 // ... and per look-up
)

// age moves entries on into the bins of their age, and counts them at risk there. It goes round the classes and
// does a bounded amount of work: what it leaves is done with the next look-up.
func (h *Hazard) age(now uint32, blocks int) {
	credit := minCrossings + crossingsABlock*blocks
	for range len(h.kinds) * numClasses {
		if h.turn.class++; h.turn.class == numClasses {
			h.turn.class = 0
			h.turn.kind = (h.turn.kind + 1) % len(h.kinds)
		}
		k := h.kinds[h.turn.kind]
		c := h.turn.class
		if k == nil || k.filled[c] == 0 || int32(now-k.due[c]) < 0 {
			continue
		}
		if credit = h.ageClass(k, c, now, credit); credit <= 0 {
			return
		}
	}
}

// ageClass goes from the oldest bin to the youngest, so that an entry may cross several bins at once: those
// before it in the list have gone ahead.
func (h *Hazard) ageClass(k *cells, c int, now uint32, credit int) int {
	due := now + 1<<30
	for m := k.filled[c]; m != 0; {
		b := bits.Len64(m) - 1
		m &^= 1 << b
		if b == numBins-1 {
			continue
		}
		for k.filled[c]&(1<<b) != 0 {
			e := k.first[c][b]
			n := h.nodes.at(e)
			if int64(now-n.used) < edges[b+1] {
				if at := n.used + uint32(edges[b+1]); int32(at-due) < 0 {
					due = at
				}
				break
			}
			if credit--; credit < 0 {
				k.due[c] = now
				return 0
			}
			due = h.cross(k, c, b, e, n, now, due)
		}
	}
	k.due[c] = due
	return credit
}

// cross moves the oldest entry of a bin on, not past the next older entry.
func (h *Hazard) cross(k *cells, c, b int, e uint32, n *node, now, due uint32) uint32 {
	to := binOf(now - n.used)
	if n.older != 0 {
		to = min(to, int(h.nodes.at(n.older).bin))
	}
	if to <= b {
		to = b + 1
	}
	h.tables.enter(uint8(c), b, to)
	newer := n.newer
	n.bin = uint8(to)
	k.next(&h.nodes, &h.worths, c, b, newer)
	if k.filled[c]&(1<<to) == 0 {
		k.fill(&h.worths, c, to, e)
	}
	if to < numBins-1 {
		if at := n.used + uint32(edges[to+1]); int32(at-due) < 0 {
			due = at
		}
	}
	return due
}
