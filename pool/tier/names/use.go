package names

import (
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// InUse records that an engine of this node uses a space, as pool.SpaceUse says. A private or named
// space is in the catalog on disk before its first byte is in a tier, so that it is collected even
// if this process dies.
func (n *Names) InUse(fp pool.Fingerprint, g pool.Generation) {
	if len(n.tiers) == 0 {
		return
	}
	if n.recordUse(fp, g) {
		n.o.Changed(fp)
	}
}

// recordUse records a use. It reports whether the space was abandoned until now.
func (n *Names) recordUse(fp pool.Fingerprint, g pool.Generation) (back bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e, ok := n.mu.catalog.Spaces[fp]
	collected := g == pool.PrivateGeneration || g == pool.NamedGeneration && n.o.CollectUnused > 0
	if ok || collected {
		e.Used, e.Private, e.Named = n.now().Unix(), g == pool.PrivateGeneration, g == pool.NamedGeneration
		n.makeRoomLocked(fp, e.Used)
		n.mu.catalog.Spaces[fp] = e
		n.mu.dirty = true
	}
	delete(n.mu.idle, fp)
	if g == pool.NamedGeneration {
		n.namedInUseLocked(fp)
	}
	if collected && !ok && n.o.File != nil {
		n.mu.unsaved[fp] = true
		n.changedNow()
	}
	back = n.mu.abandoned[fp]
	delete(n.mu.abandoned, fp)
	return back
}

// namedInUseLocked records that a named space has an engine of this node. Its names are no orphans
// then.
func (n *Names) namedInUseLocked(fp pool.Fingerprint) {
	n.mu.active[fp] = true
	n.restoreLocked(fp)
	n.Follow()
}

// restoreLocked removes the orphans of a named space that was abandoned.
func (n *Names) restoreLocked(fp pool.Fingerprint) {
	for name, left := range n.mu.catalog.Orphans {
		if left.Unused && left.Space == fp {
			delete(n.mu.catalog.Orphans, name)
			n.mu.dirty = true
			n.changedNow()
		}
	}
}

// NotInUse records that the last engine of a space has left.
func (n *Names) NotInUse(fp pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.mu.catalog.Spaces[fp]
	switch {
	case e.Private:
		n.mu.idle[fp] = n.now()
	case e.Named && n.mu.active[fp]:
		e.Used = n.now().Unix()
		n.mu.catalog.Spaces[fp] = e
		n.mu.dirty = true
	}
	delete(n.mu.active, fp)
}

// abandonPrivate takes private spaces whose engines disconnected CollectAfter ago out of the tiers
// and makes their names orphans. Blocks of them that memory still has are not written to tiers.
func (n *Names) abandonPrivate() {
	for _, fp := range n.privateToAbandon() {
		n.o.Changed(fp)
	}
}

func (n *Names) privateToAbandon() (all []pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.now()
	for fp, since := range n.mu.idle {
		if now.Sub(since) < n.o.CollectAfter {
			continue
		}
		delete(n.mu.idle, fp)
		n.mu.abandoned[fp] = true
		e := n.mu.catalog.Spaces[fp]
		n.addOrphanLocked(catalog.StoredName(fp, e.Epoch), catalog.Orphan{
			Space: fp, Epoch: e.Epoch, Private: true, NotBefore: now.UnixMilli(),
		})
		n.changedNow()
		all = append(all, fp)
	}
	return all
}

// abandonUnused records which named spaces are in use, once a period, and abandons those that this
// node has not used for CollectUnused. Blocks of them that memory still has are not written to
// tiers.
func (n *Names) abandonUnused() {
	if n.o.CollectUnused == 0 {
		return
	}
	for _, fp := range n.unusedToAbandon(n.o.CollectUnused, n.now()) {
		n.o.Changed(fp)
	}
}

// unusedToAbandon abandons spaces, so many that at most half of the catalog's orphans are filled,
// and returns them.
func (n *Names) unusedToAbandon(span time.Duration, now time.Time) (all []pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	own := catalog.OwnLength(span)
	for fp := range n.mu.active {
		if e, ok := n.mu.catalog.Spaces[fp]; ok && catalog.PeriodAt(e.Used, own) != catalog.PeriodAt(now.Unix(), own) {
			e.Used = now.Unix()
			n.mu.catalog.Spaces[fp] = e
			n.mu.dirty = true
		}
	}
	if now.Before(n.started.Add(n.o.CollectAfter)) {
		return nil // engines of the previous process have as long to return
	}
	left := make(map[pool.Fingerprint]bool)
	for _, one := range n.mu.catalog.Orphans {
		if one.Unused {
			left[one.Space] = true
		}
	}
	first := catalog.PeriodAt(now.Unix()-int64(span/time.Second), own)
	for fp, e := range n.mu.catalog.Spaces {
		if !e.Named || n.mu.active[fp] || left[fp] || catalog.PeriodAt(max(e.Used, e.Seen), own) >= first {
			continue
		}
		if len(n.mu.catalog.Orphans) >= catalog.MaxOrphans/2 {
			break
		}
		n.abandonLocked(fp, e, now)
		all = append(all, fp)
	}
	return all
}

// abandonLocked makes the names of a space orphans: that of its epoch, those before it, and that of
// epoch 0, which nodes use that missed every reset.
func (n *Names) abandonLocked(fp pool.Fingerprint, e catalog.Space, now time.Time) {
	n.mu.abandoned[fp] = true
	n.mu.unused++
	e.Seen = 0
	n.mu.catalog.Spaces[fp] = e
	epochs := []uint64{0}
	for epoch := e.Epoch - min(e.Epoch, maxOldNames) + 1; epoch <= e.Epoch; epoch++ {
		epochs = append(epochs, epoch)
	}
	for _, epoch := range epochs {
		name := catalog.StoredName(fp, epoch)
		if _, noted := n.mu.catalog.Orphans[name]; !noted {
			n.addOrphanLocked(name, catalog.Orphan{Space: fp, Epoch: epoch, Unused: true, NotBefore: now.UnixMilli()})
		}
	}
	n.changedNow()
}

// usedElsewhereLocked records that another node was found to use a space. That delays when the
// space is abandoned next.
func (n *Names) usedElsewhereLocked(fp pool.Fingerprint, now time.Time) {
	e, ok := n.mu.catalog.Spaces[fp]
	if !ok {
		return
	}
	if e.Seen == 0 {
		n.mu.elsewhere++
	}
	e.Seen = now.Unix()
	n.mu.catalog.Spaces[fp] = e
}
