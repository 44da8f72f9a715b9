package names

import (
	"context"
	"maps"
	"time"
)

// save writes the catalog to disk; the caller holds changeMu. Spaces that were off only because the
// catalog was not on disk get their names in the tiers again.
func (n *Names) save() error {
	n.mu.Lock()
	now := n.mu.catalog.Clone()
	waited := maps.Clone(n.mu.off)
	n.mu.dirty = false
	n.mu.Unlock()
	if n.o.File != nil {
		if err := n.o.File.Write(now); err != nil {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.mu.dirty = true
			return err
		}
	}
	n.mu.Lock()
	for fp := range waited {
		if !n.mu.failed[fp] { // a missing epoch is not made up for by saving
			delete(n.mu.off, fp)
		}
	}
	n.mu.Unlock()
	for fp := range waited {
		n.o.Changed(fp)
	}
	return nil
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

// saveLoop saves changes that no caller waits for.
func (n *Names) saveLoop(ctx context.Context) {
	tick := time.NewTicker(n.o.EpochEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			n.flush()
		}
	}
}
