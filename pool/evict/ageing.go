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
	m := k.filled[c]
	for m != 0 && credit > 0 {
		b := bits.Len64(m) - 1
		m &^= 1 << b
		if b < numBins-1 {
			credit = h.ageBin(k, c, b, now, credit)
		}
	}
	k.settle(c, &h.worths[c])
	k.due[c] = now
	if credit > 0 {
		k.due[c] = h.nextDue(k, c, now)
	}
	return credit
}

// ageBin moves the entries of a bin on that are too old for it, the oldest first, none past the one before it.
func (h *Hazard) ageBin(k *cells, c, b int, now uint32, credit int) int {
	e := k.first[c][b]
	n := h.nodes.at(e)
	ahead := numBins - 1
	if n.older != 0 {
		ahead = int(h.nodes.at(n.older).bin)
	}
	for ; credit > 0 && int64(now-n.used) >= edges[b+1]; credit-- {
		to := max(b+1, min(binOf(now-n.used), ahead))
		h.tables.enter(uint8(c), b, to)
		n.bin, ahead = uint8(to), to
		if k.filled[c]>>to&1 == 0 {
			k.first[c][to], k.filled[c] = e, k.filled[c]|1<<to
		}
		if e = n.newer; e == 0 {
			break
		}
		if n = h.nodes.at(e); int(n.bin) != b {
			e = 0
			break
		}
	}
	if k.first[c][b] = e; e == 0 {
		k.filled[c] &^= 1 << b
	}
	return credit
}

// nextDue is when the next entry of a class leaves its bin.
func (h *Hazard) nextDue(k *cells, c int, now uint32) uint32 {
	due := now + 1<<30
	for m := k.filled[c]; m != 0; m &= m - 1 {
		b := bits.TrailingZeros64(m)
		if b == numBins-1 {
			break
		}
		if at := h.nodes.at(k.first[c][b]).used + uint32(edges[b+1]); int32(at-due) < 0 {
			due = at
		}
	}
	return due
}
