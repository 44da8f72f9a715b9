package evict

import "fmt"

// Check verifies all invariants and returns the first violation. It is slow and meant for tests.
func (h *Hazard) Check() error {
	n, lost := 0, 0
	for number, k := range h.kinds {
		if k == nil {
			continue
		}
		in, err := h.checkKind(k, uint8(number))
		if err != nil {
			return fmt.Errorf("evict: kind %d: %w", number, err)
		}
		n, lost = n+in, lost+k.recency.lost
	}
	if n != h.entries || lost != h.lost {
		return fmt.Errorf("evict: %d entries and %d lost blocks in lists, counts %d and %d", n, lost, h.entries, h.lost)
	}
	return nil
}

func (h *Hazard) checkKind(k *kind, number uint8) (n int, err error) {
	inSpan := map[*span]int32{} // young entries
	for c := range numClasses {
		in, err := h.checkClass(k, number, uint16(c), inSpan)
		if err != nil {
			return 0, fmt.Errorf("class %d: %w", c, err)
		}
		n += in
	}
	for i := range k.half {
		if err := h.checkWorst(&k.half[i]); err != nil {
			return 0, err
		}
	}
	if n != k.entries {
		return 0, fmt.Errorf("%d entries in lists, counts %d", n, k.entries)
	}
	return n, h.checkRecency(k, number, inSpan)
}

// checkRecency counts what LRU would have: the young entries of each span, and the ghosts of lost
// blocks, of which a full table may have dropped some.
func (h *Hazard) checkRecency(k *kind, number uint8, inSpan map[*span]int32) error {
	lost := map[*span]int32{}
	h.ghosts.settle()
	for set := range h.ghosts.sets {
		s := h.ghosts.at(set)
		for w, info := range s.info {
			if info == 0 || s.kind[w] != number || !h.inLRU(s, w) {
				continue
			}
			at := k.recency.at(s.way[w].used)
			if inSpan[at]++; info&ghostPaid == 0 {
				lost[at]++
			}
		}
	}
	r, blocks, missing := &k.recency, 0, 0
	for i := r.first; i < r.end; i++ {
		s := &r.spans[i]
		if i > r.first && !before(r.spans[i-1].from, s.from) {
			return fmt.Errorf("span %d of LRU begins at %d, that before it at %d", i, s.from, r.spans[i-1].from)
		}
		if s.blocks < inSpan[s] || s.lost < lost[s] || s.lost > s.blocks {
			return fmt.Errorf("span %d of LRU is %+v; %d blocks are in it, %d of them lost", i, *s, inSpan[s], lost[s])
		}
		blocks, missing = blocks+int(s.blocks), missing+int(s.lost)
	}
	if blocks != r.blocks || missing != r.lost {
		return fmt.Errorf("LRU has %d blocks, %d of them lost, counts %d and %d", blocks, missing, r.blocks, r.lost)
	}
	return nil
}

// checkClass checks the runs of a class from its newest.
func (h *Hazard) checkClass(k *kind, kind uint8, c uint16, inSpan map[*span]int32) (n int, err error) {
	var first [2][numBins]eldest
	var held [2]uint32
	newer := uint32(0)
	for id := k.newest[c]; id != 0; {
		r := h.nodes.runs.at(id)
		if r.newer != newer || r.class != c || r.half == old && uint32(h.clock.now)-r.used <= longestSight &&
			k.recency.has(r.used) {
			return 0, fmt.Errorf(
				"run %d is %+v, and %d is before it; LRU goes back to %d", id, *r, newer, k.recency.cutoff(),
			)
		}
		if newer != 0 {
			if x := h.nodes.runs.at(newer); x.half > r.half || x.bin > r.bin {
				return 0, fmt.Errorf("run %+v is before %+v", *x, *r)
			}
		}
		if err := h.checkRun(id, r, kind); err != nil {
			return 0, err
		}
		first[r.half][r.bin] = eldest{id, r.used}
		held[r.half] += uint32(r.count)
		if n += int(r.count); n > h.entries {
			return 0, fmt.Errorf("the list goes in a circle")
		}
		if r.half == young && k.recency.has(r.used) {
			inSpan[k.recency.at(r.used)] += int32(r.count)
		}
		newer, id = id, r.older
	}
	for i := range k.half {
		half := &k.half[i]
		if first[i] != half.first[c] || held[i] != half.held[c] || (held[i] != 0) != (half.full[c/64]>>(c%64)&1 != 0) {
			return 0, fmt.Errorf(
				"half %d has %d entries, counts %d; oldest of the bins %v, holds %v", i, held[i], half.held[c],
				first[i], half.first[c],
			)
		}
		for b, e := range first[i] {
			if (e.run != 0) != (half.filled[c]>>b&1 != 0) {
				return 0, fmt.Errorf("bin %d: oldest is %v, filled %b", b, e, half.filled[c])
			}
		}
	}
	return n, nil
}

// checkRun checks the entries of a run from its oldest.
func (h *Hazard) checkRun(id uint32, r *run, kind uint8) error {
	n, older := 0, uint32(0)
	for e := r.first; e != 0; older, e = e, h.nodes.at(e).newer {
		x := h.nodes.at(e)
		if x.state&statePresent == 0 || x.kind != kind || x.older != older || x.run != id {
			return fmt.Errorf("entry %d of run %d is %+v, and %d follows it", e, id, *x, older)
		}
		if n++; n > int(r.count) {
			break
		}
	}
	if n != int(r.count) || older != r.last {
		return fmt.Errorf("run %+v has %d entries, the newest is %d", *r, n, older)
	}
	return nil
}

// checkWorst finds the cell with the least worth by comparing all.
func (h *Hazard) checkWorst(k *cells) error {
	worst := inf
	for c := range numClasses {
		for b := range numBins {
			if k.filled[c]>>b&1 != 0 {
				worst = min(worst, h.worths[c][b])
			}
		}
		if k.masked[c] != 0 {
			return fmt.Errorf("class %d is still passed over", c)
		}
	}
	w := int(k.winner[1])
	if k.worst[w] != worst || (worst < inf && h.worths[w][k.low[w]] != worst) {
		return fmt.Errorf("least worth is %g, the tournament says %g in class %d", worst, k.worst[w], w)
	}
	return nil
}
