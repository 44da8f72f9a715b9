package names

import (
	"context"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Collection deletes what tiers hold under orphans: names of earlier epochs, and of spaces that are
// no longer used. It scans one store at a time, at CollectRate keys a second, in small calls that
// yield to look-ups and fetches. The catalog holds what is still to be scanned; an interrupted scan
// starts again. Each name is scanned for twice, CollectAfter apart, to find also what a node wrote
// before it learned of the reset.
const (
	collectScans = 2                     // scans of a tier for each name
	collectNames = 64                    // names of one scan
	collectRetry = time.Minute           // after a store failed
	collectPause = 10 * time.Millisecond // least time between two looks for names to scan
)

// collectLoop runs the collector until ctx ends.
func (n *Names) collectLoop(ctx context.Context) {
	again := make(map[*tier]time.Time) // after a failure: when to try again
	for {
		next := n.now().Add(n.o.CollectAfter)
		for _, t := range n.tiers {
			at := n.collectFrom(ctx, t, again)
			if at.Before(next) {
				next = at
			}
		}
		if !pause(ctx, min(max(next.Sub(n.now()), collectPause), n.o.EpochEvery)) {
			return
		}
	}
}

// collectFrom scans a tier for all names whose time has come, and returns when the next one's
// comes.
func (n *Names) collectFrom(ctx context.Context, t *tier, again map[*tier]time.Time) time.Time {
	for ctx.Err() == nil {
		now := n.now()
		names, next := n.namesToScan(t, now)
		if len(names) == 0 {
			return next
		}
		if !t.Up() || now.Before(again[t]) {
			return now.Add(collectRetry)
		}
		names, err := t.withoutUseMarks(ctx, names)
		if err == nil && len(names) > 0 {
			err = t.collect(ctx, names)
		}
		if err != nil {
			if ctx.Err() == nil {
				t.count.collectFails.Add(1)
				t.Log("collecting unused names failed, will retry", err)
			}
			again[t] = now.Add(collectRetry)
			return again[t]
		}
		n.scanned(t, names, n.now())
		n.flush()
	}
	return n.now()
}

// namesToScan returns the names to scan a tier for now, and when the next one's time comes.
// pool.UseMarks is among them if old use marks are to be collected.
func (n *Names) namesToScan(t *tier, now time.Time) (names []pool.Fingerprint, next time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	next = now.Add(n.o.CollectAfter)
	if at, ok := n.nextMarkSweepLocked(t); ok && !at.After(now) {
		names = append(names, pool.UseMarks)
	} else if ok && at.Before(next) {
		next = at
	}
	for name, left := range n.mu.catalog.Orphans {
		done := left.Tiers[t.Name]
		if !t.needsScan(&left) {
			continue
		}
		switch at := time.UnixMilli(max(left.NotBefore, done.Next)); {
		case at.After(now):
			if at.Before(next) {
				next = at
			}
		case len(names) < collectNames:
			names = append(names, name)
		}
	}
	return names, next
}

// scanned records that a tier was scanned for names. Names that all tiers are done with leave the
// catalog.
func (n *Names) scanned(t *tier, names []pool.Fingerprint, now time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, name := range names {
		if name == pool.UseMarks {
			n.mu.catalog.Swept[t.Name], n.mu.dirty = now.Unix(), true
		}
		left, still := n.mu.catalog.Orphans[name]
		if !still {
			continue
		}
		done := left.Tiers[t.Name]
		done.N, done.Next = done.N+1, now.Add(n.o.CollectAfter).UnixMilli()
		if !t.canList() {
			done.N = collectScans
		}
		left.Tiers[t.Name] = done
		n.mu.dirty = true
		if !n.needsScan(&left) {
			n.collectedLocked(name, left)
		}
	}
}

// collectedLocked removes a name from the catalog, and its space if that was abandoned, has no
// other orphans and is not used by another node.
func (n *Names) collectedLocked(name pool.Fingerprint, left catalog.Orphan) {
	delete(n.mu.catalog.Orphans, name)
	if !n.mu.abandoned[left.Space] {
		return
	}
	for _, other := range n.mu.catalog.Orphans {
		if other.Space == left.Space {
			return // the epoch is needed until the last name is collected
		}
	}
	if e := n.mu.catalog.Spaces[left.Space]; e.Named && e.Seen != 0 {
		return
	}
	delete(n.mu.catalog.Spaces, left.Space)
	if !n.openLocked(left.Space) { // an open one stays abandoned until an engine uses it or it is closed
		delete(n.mu.abandoned, left.Space)
	}
}

// needsScan reports whether any tier is still to be scanned for a name.
func (n *Names) needsScan(left *catalog.Orphan) bool {
	return slices.ContainsFunc(n.tiers, func(t *tier) bool { return t.needsScan(left) })
}

// staleMarkers returns the markers to delete with the last scan for names. It returns none for a
// space that is neither private nor in the catalog: other nodes may need them.
func (n *Names) staleMarkers(t *tier, names []pool.Fingerprint) (keys []pool.Key) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, name := range names {
		left, still := n.mu.catalog.Orphans[name]
		if !still || t.canList() && left.Tiers[t.Name].N+1 < collectScans {
			continue
		}
		e, ok := n.mu.catalog.Spaces[left.Space]
		if !ok && !left.Private || left.Unused && !t.canList() {
			continue
		}
		needed := catalog.Below(e.Epoch)
		gone := []uint64{left.Epoch}
		if left.Private || left.Unused && left.Epoch == e.Epoch {
			needed, gone = nil, catalog.Below(left.Epoch)
		}
		for _, epoch := range gone {
			if epoch > 0 && !slices.Contains(needed, epoch) {
				keys = append(keys, catalog.MarkerKey(left.Space, epoch))
			}
		}
	}
	return keys
}

// stillOrphaned returns the keys to delete: those whose names are still orphans, which it counts,
// and use marks that no node reads any more.
func (n *Names) stillOrphaned(t *tier, keys []pool.Key, sizes []int64) (still []pool.Key, shards int, bytes int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.now()
	for i := range keys {
		left, noted := n.mu.catalog.Orphans[keys[i].Space]
		switch {
		case noted && t.needsScan(&left):
			shards, bytes = shards+1, bytes+sizes[i]
		case keys[i].Space != pool.UseMarks || !catalog.StaleMark(&keys[i], now):
			continue
		}
		still = append(still, keys[i])
	}
	return still, shards, bytes
}
