package evict

import "fmt"

// Check walks everything and names the first promise that does not hold. It is slow and meant for tests.
func (h *Hazard) Check() error {
	n, lost := 0, 0
	for number, k := range h.kinds {
		if k == nil {
			continue
		}
		in, gone, err := h.checkKind(k, uint8(number))
		if err != nil {
			return fmt.Errorf("evict: kind %d: %w", number, err)
		}
		n, lost = n+in, lost+gone
	}
	if n != h.entries || lost != h.lost.blocks {
		return fmt.Errorf("evict: %d entries and %d lost blocks in lists, counts %d and %d", n, lost, h.entries, h.lost.blocks)
	}
	return nil
}

func (h *Hazard) checkKind(k *kind, number uint8) (n, lost int, err error) {
	for i, half := range k.both() {
		for c := range numClasses {
			in, err := h.checkClass(half, number, uint8(c), i == 1)
			if err != nil {
				return 0, 0, fmt.Errorf("class %d: %w", c, err)
			}
			n += in
		}
		if err := h.checkWorst(half); err != nil {
			return 0, 0, err
		}
	}
	if n != k.entries {
		return 0, 0, fmt.Errorf("%d entries in lists, counts %d", n, k.entries)
	}
	lost, err = h.checkShadow(k, number)
	return n, lost, err
}

// checkShadow walks what LRU would have, from its newest block.
func (h *Hazard) checkShadow(k *kind, number uint8) (lost int, err error) {
	s, newer, n := &k.shadow, uint32(0), 0
	for id := s.newest; id != 0; newer, id = id, h.links(id).older {
		if h.links(id).newer != newer {
			return 0, fmt.Errorf("block %#x of LRU follows %#x and names %#x", id, newer, h.links(id).newer)
		}
		if n++; n > s.blocks {
			return 0, fmt.Errorf("LRU has %d blocks, its list more", s.blocks)
		}
		if id&lostBit == 0 {
			if x := h.nodes.at(id); x.state&stateKnown == 0 || x.state&stateRecent == 0 || x.kind != number {
				return 0, fmt.Errorf("entry %d of LRU is %+v", id, *x)
			}
			continue
		}
		lost++
		if b := h.lost.at(id); b.kind != number || h.lost.find(uint64(b.high)<<32|uint64(b.low)) != id {
			return 0, fmt.Errorf("lost block %#x of LRU is %+v", id, *b)
		}
	}
	young := 0
	for _, held := range k.young.held {
		young += int(held)
	}
	if n != s.blocks || newer != s.oldest || n-lost != young {
		return 0, fmt.Errorf("LRU has %d blocks, counts %d; %d of them are lost, and %d entries are young", n, s.blocks, lost, young)
	}
	return lost, nil
}

// checkClass walks the list of a class from its newest entry.
func (h *Hazard) checkClass(k *cells, kind, c uint8, young bool) (n int, err error) {
	var first [numBins]eldest
	var r *run // that of the entry before
	newer, inRun := uint32(0), 0
	for e := k.newest[c]; e != 0; e = h.nodes.at(e).older {
		x := h.nodes.at(e)
		if x.state&stateKnown == 0 || x.state&stateRecent != 0 != young || x.kind != kind || x.newer != newer {
			return 0, fmt.Errorf("entry %d is %+v, and %d is before it", e, *x, newer)
		}
		if at := h.nodes.runOf(x); at != r {
			if err := h.checkRun(at, r, newer, inRun, young); err != nil {
				return 0, fmt.Errorf("entry %d: %w", e, err)
			}
			if at.class != c {
				return 0, fmt.Errorf("entry %d of run %+v", e, *at)
			}
			r, inRun = at, 0
			first[at.bin] = eldest{x.run, at.used}
		}
		newer, inRun = e, inRun+1
		if n++; n > h.entries {
			return 0, fmt.Errorf("the list goes in a circle")
		}
	}
	if err := h.checkRun(nil, r, newer, inRun, young); err != nil {
		return 0, err
	}
	if first != k.first[c] || n != int(k.held[c]) {
		return 0, fmt.Errorf("%d entries, counts %d; oldest of the bins %v, holds %v", n, k.held[c], first, k.first[c])
	}
	for b, e := range first {
		if (e.run != 0) != (k.filled[c]>>b&1 != 0) {
			return 0, fmt.Errorf("bin %d: oldest is %v, filled %b", b, e, k.filled[c])
		}
	}
	return n, nil
}

// checkRun holds a run to its entries, the last of which is its oldest, and to the run behind it; nil is none.
func (h *Hazard) checkRun(older, r *run, oldest uint32, entries int, young bool) error {
	switch {
	case r != nil && (r.first != oldest || int(r.count) != entries):
		return fmt.Errorf("run %+v has %d entries, the oldest is %d", *r, entries, oldest)
	case older == nil:
		return nil
	case r == nil && older.newer != 0, r != nil && (older.newer == 0 || h.nodes.runs.at(older.newer) != r):
		return fmt.Errorf("run %+v is behind %+v", *older, r)
	case r != nil && older.bin < r.bin:
		return fmt.Errorf("run %+v is older than %+v, in a later bin", *older, *r)
	case r != nil && young && int32(r.used-older.used) < 0:
		return fmt.Errorf("run %+v was used after %+v, which is before it", *older, *r)
	}
	return nil
}

// checkWorst looks for the cell that is worth least the slow way.
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
