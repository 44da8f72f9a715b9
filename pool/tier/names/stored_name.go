package names

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Name is how an open space is stored in tiers.
type Name struct {
	Stored pool.Fingerprint
	// the tiers must not be used: the space is not saved yet, memory may have what was stored
	// before a reset, or the space is being collected
	Off  bool
	Soon bool // Off for one of the first two reasons, and not for the third
}

// Opened records that a space is open, and returns its name as Use does.
func (n *Names) Opened(fp pool.Fingerprint) Name {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.openLocked(fp) {
		n.mu.open = append(n.mu.open, fp)
	}
	return n.useLocked(fp)
}

// Use returns the name of an open space. A name in use is no orphan.
func (n *Names) Use(fp pool.Fingerprint) Name {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.useLocked(fp)
}

func (n *Names) useLocked(fp pool.Fingerprint) Name {
	name := n.storedLocked(fp)
	soon := n.mu.off[fp] || n.mu.unsaved[fp] || n.mu.catalog.Spaces[fp].Forget
	if _, left := n.mu.catalog.Orphans[name]; left && !n.mu.abandoned[fp] {
		delete(n.mu.catalog.Orphans, name)
		n.mu.dirty = true
	}
	return Name{Stored: name, Off: soon || n.mu.abandoned[fp], Soon: soon && !n.mu.abandoned[fp]}
}

// Closed records that a space is no longer open. It also ends the collection of a space of which
// nothing is left.
func (n *Names) Closed(fp pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.open = slices.DeleteFunc(n.mu.open, func(other pool.Fingerprint) bool { return other == fp })
	if _, ok := n.mu.catalog.Spaces[fp]; !ok {
		delete(n.mu.abandoned, fp)
	}
}

func (n *Names) openLocked(fp pool.Fingerprint) bool { return slices.Contains(n.mu.open, fp) }

// StoredAs returns the present name of a space, which need not be open.
func (n *Names) StoredAs(fp pool.Fingerprint) pool.Fingerprint {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.storedLocked(fp)
}

func (n *Names) storedLocked(fp pool.Fingerprint) pool.Fingerprint {
	return catalog.StoredName(fp, n.mu.catalog.Spaces[fp].Epoch)
}

// Catalog returns a copy of the catalog.
func (n *Names) Catalog() *catalog.Catalog {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.catalog.Clone()
}
