package names

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// logEvery is the least time between two log lines about lost names.
const logEvery = time.Second

// save writes the catalog to disk; the caller holds changeMu. Spaces that were off only because the
// catalog was not on disk get their names in the tiers again.
func (n *Names) save() error {
	n.mu.Lock()
	now := n.mu.catalog.Clone()
	waited := make(map[pool.Fingerprint]bool, len(n.mu.off)+len(n.mu.unsaved))
	maps.Copy(waited, n.mu.off)
	maps.Copy(waited, n.mu.unsaved)
	n.mu.dirty = false
	n.mu.Unlock()
	var err error
	if n.o.File != nil {
		err = n.o.File.Write(now)
	}
	n.saved(waited, err)
	if err != nil {
		return err
	}
	for fp := range waited {
		n.o.Changed(fp)
	}
	return nil
}

// saved records the end of a write to disk, for which some spaces waited.
func (n *Names) saved(waited map[pool.Fingerprint]bool, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		n.mu.dirty = true
		return
	}
	for fp := range waited {
		if !n.mu.failed[fp] { // a missing epoch is not made up for by saving
			delete(n.mu.off, fp)
		}
		delete(n.mu.unsaved, fp)
	}
}

// flush saves the catalog if it has changed.
func (n *Names) flush() {
	n.changeMu.Lock()
	defer n.changeMu.Unlock()
	n.mu.Lock()
	dirty := n.mu.dirty
	n.mu.Unlock()
	if !dirty {
		return
	}
	if err := n.save(); err != nil {
		n.o.Log("writing the catalog of resets failed", err)
	}
}

// saveLoop saves changes that no caller waits for, and abandons spaces that are no longer used.
func (n *Names) saveLoop(ctx context.Context) {
	tick := time.NewTicker(n.o.EpochEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-n.changed:
		}
		n.abandonPrivate()
		n.abandonUnused()
		n.flush()
		n.logLost()
	}
}

// changedNow wakes saveLoop.
func (n *Names) changedNow() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// logLost logs, at most once per logEvery, that names will not be collected because the catalog has
// too many.
func (n *Names) logLost() {
	n.mu.Lock()
	lost := n.mu.lost
	n.mu.Unlock()
	if now := n.now(); lost > n.loggedLost && now.Sub(n.loggedAt) >= logEvery {
		n.loggedLost, n.loggedAt = lost, now
		n.o.Log(fmt.Sprintf("%d names of spaces will not be collected: the catalog is full", lost), nil)
	}
}
