package evict

import (
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// Report implements pool.Policy.
func (h *Hazard) Report() pool.PolicyReport {
	s := &h.shadow
	r := pool.PolicyReport{
		Name: "hazard", Entries: h.entries, Ghosts: h.ghosts.count, Bytes: h.bytes(),
		ShadowLookups: s.lookups, ShadowHits: s.hits, SampleHits: s.own, Margin: s.margin, Alarms: s.alarms,
		Missing: float64(s.missing) * s.scale(), MayMiss: max(0, h.credit.missing(h.entries)),
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
		pc.Entries += int(k.held[c])
		pc.Evicted += k.gone[c]
		next = min(next, k.worst[c])
	}
	if next < inf {
		pc.WorthNext = float64(next) * hour
	}
	return pc
}

func (h *Hazard) bytes() int64 {
	n := h.nodes.bytes() + h.ghosts.bytes() + int64(unsafe.Sizeof(*h))
	for _, k := range h.kinds {
		if k != nil {
			n += int64(unsafe.Sizeof(*k))
		}
	}
	return n
}
