package names

import (
	"maps"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// addOrphanLocked records an orphan. Beyond the bound it drops, and counts, the one whose scan
// could begin first.
func (n *Names) addOrphanLocked(name pool.Fingerprint, left catalog.Orphan) {
	orphans := n.mu.catalog.Orphans
	if _, noted := orphans[name]; !noted && len(orphans) >= catalog.MaxOrphans {
		var first pool.Fingerprint
		due := int64(-1)
		for other, l := range orphans {
			if due < 0 || l.NotBefore < due {
				first, due = other, l.NotBefore
			}
		}
		delete(orphans, first)
		n.mu.lost++
	}
	left.Tiers = map[string]catalog.Scans{}
	orphans[name] = left
	n.mu.dirty = true
}

// makeRoomLocked makes room in the catalog for one more space. It removes the least recently used
// one, preferably without orphans, and makes its name an orphan: in all tiers if it is private,
// otherwise in local tiers alone, since other nodes may use the name. For a named space the rest is
// counted as lost. A removed space that returns learns its epoch from the markers in the shared
// tiers.
func (n *Names) makeRoomLocked(fp pool.Fingerprint, now int64) {
	if _, ok := n.mu.catalog.Spaces[fp]; ok || len(n.mu.catalog.Spaces) < catalog.MaxSpaces {
		return
	}
	victim, found := n.leastNeededLocked()
	if !found {
		return // more spaces are open than the bound: the file grows
	}
	e := n.mu.catalog.Spaces[victim]
	delete(n.mu.catalog.Spaces, victim)
	delete(n.mu.idle, victim)
	delete(n.mu.abandoned, victim)
	if e.Named {
		n.mu.lost++
	}
	left := catalog.Orphan{Space: victim, Epoch: e.Epoch, Private: e.Private, Local: !e.Private}
	left.NotBefore = time.Unix(now, 0).Add(n.o.CollectAfter).UnixMilli()
	if slices.ContainsFunc(n.tiers, func(t *tier) bool { return t.covers(&left) }) {
		n.addOrphanLocked(catalog.StoredName(victim, e.Epoch), left)
	}
}

// leastNeededLocked returns the space that was used least recently, of those that are not open,
// preferably one without orphans.
func (n *Names) leastNeededLocked() (victim pool.Fingerprint, found bool) {
	busy := map[pool.Fingerprint]bool{}
	for _, left := range n.mu.catalog.Orphans {
		busy[left.Space] = true
	}
	open := maps.Clone(n.mu.active)
	for _, fp := range n.mu.open {
		open[fp] = true
	}
	worth := int64(0)
	for other, e := range n.mu.catalog.Spaces {
		w := e.Used
		if busy[other] {
			w += 1 << 40
		}
		if !open[other] && (!found || w < worth) {
			victim, worth, found = other, w, true
		}
	}
	return victim, found
}
