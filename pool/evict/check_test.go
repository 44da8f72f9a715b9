package evict

import "fmt"

// Check verifies all invariants and returns the first violation.
func (h *Hazard) Check() error {
	n := 0
	for number, k := range h.kinds {
		if k == nil {
			continue
		}
		var held [numClasses]uint32
		for list := range numClasses + 1 {
			if err := h.checkList(k, uint8(number), uint16(list), &held); err != nil {
				return fmt.Errorf("evict: kind %d, list %d: %w", number, list, err)
			}
		}
		if held != k.held {
			return fmt.Errorf("evict: kind %d: the lists have other entries than are counted", number)
		}
		for c := range held {
			n += int(held[c])
			if w := k.winner[1]; k.least[c] < k.least[w] {
				return fmt.Errorf("evict: kind %d: class %d is worth less than the winner %d", number, c, w)
			}
		}
	}
	if n != h.entries {
		return fmt.Errorf("evict: %d entries in lists, counts %d", n, h.entries)
	}
	return nil
}

func (h *Hazard) checkList(k *kind, kind uint8, list uint16, held *[numClasses]uint32) error {
	newer := uint32(0)
	for id := k.lists[list].newest; id != 0; newer, id = id, h.runs.at(id).older {
		r := h.runs.at(id)
		if r.newer != newer || r.list != list || r.kind != kind || list != parked && r.class != list || r.count == 0 {
			return fmt.Errorf("run %d is %+v, and %d is before it", id, *r, newer)
		}
		count, older := uint32(0), uint32(0)
		for e := r.entries.oldest; e != 0 && count <= r.count; older, e = e, h.nodes.at(e).newer {
			if x := h.nodes.at(e); x.run != id || x.older != older {
				return fmt.Errorf("entry %d of run %d is %+v, and %d is before it", e, id, *x, older)
			}
			count++
		}
		if count != r.count || older != r.entries.newest {
			return fmt.Errorf("run %+v has %d entries, the newest is %d", *r, count, older)
		}
		held[r.class] += count
	}
	if k.lists[list].oldest != newer {
		return fmt.Errorf("the oldest run is %d, says %d", newer, k.lists[list].oldest)
	}
	return nil
}
