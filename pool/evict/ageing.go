package evict

import "math/bits"

const (
	blocksAnAgeing  = 128 // blocks looked up between one ageing and the next
	crossingsABlock = 16  // entries that change their bin per block looked up, but for what is left of a run
)

// age moves runs into the bins of their age and counts them at risk there. It goes round the
// classes and does a bounded amount of work; the next call continues.
func (h *Hazard) age(now uint32, blocks int) {
	if h.turn.owed += blocks; h.turn.owed < blocksAnAgeing {
		return
	}
	budget := crossingsABlock * h.turn.owed
	h.turn.owed = 0
	for range len(h.kinds) * numClasses {
		if h.turn.class++; h.turn.class == numClasses {
			h.turn.class = 0
			h.turn.kind = (h.turn.kind + 1) % len(h.kinds)
		}
		k, c := h.kinds[h.turn.kind], h.turn.class
		if k == nil {
			continue
		}
		for i := range k.half {
			half := &k.half[len(k.half)-1-i] // the old before the young
			if half.filled[c] == 0 {
				continue
			}
			if budget = h.ageClass(half, c, now, budget); budget <= 0 {
				return
			}
		}
	}
}

// turn is the position of ageing.
type turn struct {
	kind, class, owed int
}

// ageClass ages the bins from the oldest to the youngest, so that a run may cross several bins at
// once: the runs before it have moved already.
func (h *Hazard) ageClass(k *cells, c int, now uint32, budget int) int {
	filled := k.filled[c]
	for m := filled &^ (1 << (numBins - 1)); m != 0 && budget > 0; {
		b := bits.Len64(m) - 1
		m &^= 1 << b
		budget--
		if now-k.first[c][b].used >= ends[b] {
			budget = h.ageBin(k, c, b, now, budget)
		}
	}
	if k.filled[c] != filled {
		k.settle(c, &h.worths[c])
	}
	return budget
}

// ageBin moves the runs that are too old for a bin, the oldest first, none past the run before it.
func (h *Hazard) ageBin(k *cells, c, b int, now uint32, budget int) (rest int) {
	at, ahead := k.first[c][b], numBins-1
	if older := k.filled[c] >> (b + 1); older != 0 {
		ahead = b + 1 + bits.TrailingZeros64(older)
	}
	r := h.nodes.runs.at(at.run)
	for half := r.half; budget > 0 && now-at.used >= ends[b]; {
		budget -= int(r.count)
		to := binAfter(b, now-at.used, ahead)
		h.tables.enter(uint16(c), b, to, int32(r.count))
		r.bin, ahead = uint8(to), to
		if k.filled[c]>>to&1 == 0 {
			k.first[c][to], k.filled[c] = at, k.filled[c]|1<<to
		}
		if at = (eldest{run: r.newer}); at.run == 0 {
			break
		}
		if r = h.nodes.runs.at(at.run); int(r.bin) != b || r.half != half {
			at = eldest{}
			break
		}
		at.used = r.used
	}
	if k.first[c][b] = at; at.run == 0 {
		k.filled[c] &^= 1 << b
	}
	return budget
}

// binAfter returns the bin of a run that is too old for bin b: that of its age, but not past ahead.
func binAfter(b int, age uint32, ahead int) int {
	if age < ends[b+1] {
		return b + 1
	}
	return max(b+1, min(binOf(age), ahead))
}
