package evict

import (
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// Report implements pool.Policy.
func (h *Hazard) Report() pool.PolicyReport {
	j := &h.judge
	r := pool.PolicyReport{
		Name: "hazard", Entries: h.entries, Ghosts: h.ghosts.count, Bytes: h.bytes(),
		Lookups: j.lookups, Hits: j.hits, ShadowHits: j.lru, Margin: j.margin, Alarms: j.alarms,
		Missing: h.lost, MayMiss: max(0, h.credit.mayLose(h.lost)),
		Humble:  h.humble.left > 0,
		Classes: make([]pool.PolicyClass, numClasses),
	}
	for c := range r.Classes {
		r.Classes[c] = h.reportClass(c)
	}
	return r
}

func (h *Hazard) reportClass(c int) pool.PolicyClass {
	const hour = 3600
	pc := pool.PolicyClass{Name: className(c), Worth: float64(h.worths[c][0]) * hour}
	next := inf
	for _, k := range h.kinds {
		if k == nil {
			continue
		}
		pc.Evicted += k.gone[c]
		for i := range k.half {
			pc.Entries += int(k.half[i].held[c])
			next = min(next, k.half[i].worst[c])
		}
	}
	if next < inf {
		pc.WorthNext = float64(next) * hour
	}
	return pc
}

func (h *Hazard) bytes() int64 {
	n := h.nodes.bytes() + h.nodes.runs.bytes() + h.ghosts.bytes() + h.awaited.bytes() + int64(unsafe.Sizeof(*h))
	for _, k := range h.kinds {
		if k != nil {
			n += int64(unsafe.Sizeof(*k))
		}
	}
	return n
}
