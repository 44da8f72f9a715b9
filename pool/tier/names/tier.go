package names

import (
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// tier is a tier with its follower, whose goroutine alone uses states, next and marked.
type tier struct {
	Tier
	names *Names

	wake   chan struct{}                    // cap 1: the follower is to begin a round
	states map[pool.Fingerprint]markerState // the markers of each space
	next   int                              // where the next round begins
	marked map[pool.Key]time.Time           // use marks that the store has, and until when that is believed

	count struct {
		collected, collectedBytes atomic.Uint64 // under orphans
		collectFails              atomic.Uint64 // scans that failed
		markFails                 atomic.Uint64 // calls for markers that failed
	}
}

func newTier(n *Names, t Tier) *tier {
	return &tier{Tier: t, names: n, wake: make(chan struct{}, 1), states: make(map[pool.Fingerprint]markerState)}
}

// covers reports whether a tier is scanned for a name at all.
func (t *tier) covers(left *catalog.Orphan) bool { return t.Local || !left.Local }

// needsScan reports whether a tier is still to be scanned for a name.
func (t *tier) needsScan(left *catalog.Orphan) bool {
	return t.covers(left) && left.Tiers[t.Name].N < collectScans
}

// canList reports whether a tier can list what it holds.
func (t *tier) canList() bool {
	_, some := t.Store.(pool.SpaceLister)
	_, all := t.Store.(pool.Lister)
	return some || all
}

// Report fills in the state of the names and of their collection. r.Tiers are the tiers of Open.
func (n *Names) Report(r *pool.TierReport) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r.Adopted, r.Again, r.Names, r.Lost = n.mu.adopted, n.mu.again, len(n.mu.catalog.Orphans), n.mu.lost
	r.Unused, r.UsedElsewhere = n.mu.unused, n.mu.elsewhere
	for i, t := range n.tiers {
		to := &r.Tiers[i]
		to.Collected, to.CollectedBytes = t.count.collected.Load(), t.count.collectedBytes.Load()
		to.CollectFails, to.MarkFails = t.count.collectFails.Load(), t.count.markFails.Load()
		if !t.canList() {
			continue
		}
		for _, left := range n.mu.catalog.Orphans {
			if t.needsScan(&left) {
				to.Collecting++
			}
		}
	}
}
