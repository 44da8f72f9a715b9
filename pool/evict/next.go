package evict

import (
	"cmp"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

var _ pool.Foreteller = (*Hazard)(nil)

// foremost is the cell of a class that is worth least.
type foremost struct {
	kind  *cells
	class int
	worth float32
}

// Next implements pool.Foreteller: the entries of the cell of each class that is worth least, the least worthy class first, each from its oldest entry on.
func (h *Hazard) Next(out []uint32) (n int) {
	if !h.bold() {
		return 0
	}
	for _, f := range h.foremost() {
		k, bin := f.kind, f.kind.low[f.class]
		for e := k.first[f.class][bin].entry; e != 0 && n < len(out) && h.nodes.at(e).bin == bin; e = h.nodes.at(e).newer {
			out[n] = e
			n++
		}
	}
	return n
}

// foremost are the cells that classes lose entries of next, in that order.
func (h *Hazard) foremost() (all []foremost) {
	for _, k := range h.kinds {
		if k == nil {
			continue
		}
		for class, worth := range k.worst {
			if worth < inf {
				all = append(all, foremost{k, class, worth})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b foremost) int { return cmp.Compare(a.worth, b.worth) })
	return all
}
