package evict

import "fmt"

// Check walks everything and names the first promise that does not hold. It is slow and meant for tests.
func (h *Hazard) Check() error {
	n := 0
	for kind, k := range h.kinds {
		if k == nil {
			continue
		}
		for c := range numClasses {
			in, err := h.checkClass(k, uint8(kind), uint8(c))
			if err != nil {
				return fmt.Errorf("evict: kind %d, class %d: %w", kind, c, err)
			}
			n += in
		}
		if err := h.checkWorst(k); err != nil {
			return fmt.Errorf("evict: kind %d: %w", kind, err)
		}
	}
	if n != h.entries {
		return fmt.Errorf("evict: %d entries in lists, counts %d", n, h.entries)
	}
	return nil
}

// checkClass walks the list of a class from its newest entry.
func (h *Hazard) checkClass(k *cells, kind, c uint8) (n int, err error) {
	var first [numBins]eldest
	newer := uint32(0)
	bin := 0
	for e := k.newest[c]; e != 0; e = h.nodes.at(e).older {
		x := h.nodes.at(e)
		switch {
		case x.state&stateKnown == 0 || x.kind != kind || x.class != c || x.newer != newer:
			return 0, fmt.Errorf("entry %d is %+v, and %d is before it", e, *x, newer)
		case int(x.bin) < bin:
			return 0, fmt.Errorf("entry %d in bin %d is older than one in bin %d", e, x.bin, bin)
		case newer != 0 && int32(h.nodes.at(newer).used-x.used) < 0:
			return 0, fmt.Errorf("entry %d was used after %d, which is before it", e, newer)
		}
		bin, newer = int(x.bin), e
		first[bin] = eldest{e, x.used}
		if n++; n > h.entries {
			return 0, fmt.Errorf("the list goes in a circle")
		}
	}
	if first != k.first[c] || n != int(k.held[c]) {
		return 0, fmt.Errorf("%d entries, counts %d; oldest of the bins %v, holds %v", n, k.held[c], first, k.first[c])
	}
	for b, e := range first {
		if (e.entry != 0) != (k.filled[c]>>b&1 != 0) {
			return 0, fmt.Errorf("bin %d: oldest is %v, filled %b", b, e, k.filled[c])
		}
	}
	return n, nil
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
