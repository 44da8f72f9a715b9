// Package names decides under which name each space is stored in tiers.
//
// A reset gives a space a new name, so that nothing stored before is found, however late it was
// written. Nodes agree on the names by markers in the shared tiers. What tiers hold under earlier
// names is not read again; it ends by the store's own expiry or eviction.
//
//	Reset ──▶ next epoch, next name ──▶ catalog on disk ──▶ marker in each shared tier
//	                                                              │
//	                                  followers of other nodes: the same name
package names

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Tier is a tier in which spaces have names. Its functions may be called concurrently, and never
// under a lock of Names.
type Tier struct {
	Name   string
	Store  pool.Store
	Local  bool          // no other node uses it
	Within time.Duration // limit of one call of the store

	Up  func() bool                  // reports whether the store may be called
	Log func(what string, err error) // at most once a second for each what
}

// tier is a tier with its follower, whose goroutine alone uses states and next.
type tier struct {
	Tier
	names *Names

	wake      chan struct{}                    // cap 1: the follower is to begin a round
	states    map[pool.Fingerprint]markerState // the markers of each space
	next      int                              // where the next round begins
	markFails atomic.Uint64                    // rounds that failed
}

// File keeps the catalog for the next process.
type File interface {
	Read() (*catalog.Catalog, error) // an empty one if there is none
	Write(k *catalog.Catalog) error  // returns after it is on disk
}

// Options of names. The tier package has their ranges; all but File are required.
type Options struct {
	File       File          // nil: the catalog ends with the process
	EpochEvery time.Duration // between two rounds of a follower
	Node       string        // names this node in markers
	Clock      func() time.Time
	Log        func(what string, err error)

	// The following are called without n.mu. The first two may be called under changeMu, so they
	// must not call Reset.

	// Resetting is called when a reset of a space begins. The tiers must not be used for the space
	// from then until its memory was reset.
	Resetting func(pool.Fingerprint)
	// Changed is called after the result of Use has changed for a space, open or not.
	Changed func(pool.Fingerprint)
	// Adopted is called after a space got a new name because of another node's reset. It resets the
	// space in memory.
	Adopted func(pool.Fingerprint)
}

// Names holds the names of spaces in tiers. Its methods may be called concurrently.
//
// It has two locks, taken in this order, and the caller's lock of open spaces may be held between
// the two: Opened, Use, Closed and StoredAs take mu alone.
//
//	changeMu  held by one change of the catalog, from the change to the end of its write to disk.
//	          So the file never goes back to an earlier state, and a reset is in the file when
//	          Reset returns. Holds no data; look-ups never wait for it.
//	mu        guards the catalog and all that is derived from it. Held for a moment: never during
//	          a call of a disk, a store, or a function of Options or Tier.
//
// Invariants under mu:
//
//   - A space in off is Off. It leaves off only after a write to disk.
//   - The epoch of a space never decreases, also when the catalog drops the space.
type Names struct {
	o     Options
	tiers []*tier

	changeMu sync.Mutex

	mu struct {
		sync.Mutex
		catalog *catalog.Catalog
		dirty   bool                      // catalog differs from the file
		open    []pool.Fingerprint        // spaces that are open, in the order of opening
		off     map[pool.Fingerprint]bool // a reset was not saved: no tiers, even if opened again
		failed  map[pool.Fingerprint]bool // a reset found no new epoch: off until one does
		adopted uint64                    // resets of other nodes
		again   uint64                    // resets that another node's competed with
	}
}

// Open reads the catalog.
func Open(o Options, tiers []Tier) (n *Names, err error) {
	n = &Names{o: o}
	for _, t := range tiers {
		n.tiers = append(n.tiers, &tier{
			Tier: t, names: n, wake: make(chan struct{}, 1), states: make(map[pool.Fingerprint]markerState),
		})
	}
	n.mu.off, n.mu.failed = map[pool.Fingerprint]bool{}, map[pool.Fingerprint]bool{}
	if o.File == nil {
		n.mu.catalog = catalog.New()
		return n, nil
	}
	n.mu.catalog, err = o.File.Read()
	return n, err
}

// Run saves the catalog and follows the markers of other nodes, until ctx ends.
func (n *Names) Run(ctx context.Context) {
	var loops sync.WaitGroup
	defer loops.Wait()
	loops.Go(func() { n.saveLoop(ctx) })
	for _, t := range n.tiers {
		if !t.Local {
			loops.Go(func() { t.followLoop(ctx) })
		}
	}
}

// Name is how an open space is stored in tiers.
type Name struct {
	Stored pool.Fingerprint
	// Off means that the tiers must not be used: a reset of the space is not saved yet, or memory
	// may have what was stored before it.
	Off bool
}

// Opened records that a space is open, and returns its name as Use does.
func (n *Names) Opened(fp pool.Fingerprint) Name {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !slices.Contains(n.mu.open, fp) {
		n.mu.open = append(n.mu.open, fp)
	}
	n.mu.catalog.Touch(fp, n.o.Clock().Unix())
	return n.useLocked(fp)
}

// Use returns the name of an open space.
func (n *Names) Use(fp pool.Fingerprint) Name {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.useLocked(fp)
}

func (n *Names) useLocked(fp pool.Fingerprint) Name {
	e := n.mu.catalog.Of(fp)
	return Name{Stored: catalog.StoredName(fp, e.Epoch), Off: n.mu.off[fp] || e.Forget}
}

// Closed records that a space is no longer open.
func (n *Names) Closed(fp pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.open = slices.DeleteFunc(n.mu.open, func(other pool.Fingerprint) bool { return other == fp })
}

// StoredAs returns the present name of a space, which need not be open.
func (n *Names) StoredAs(fp pool.Fingerprint) pool.Fingerprint {
	return catalog.StoredName(fp, n.Epoch(fp))
}

// Epoch returns the tier epoch of a space.
func (n *Names) Epoch(fp pool.Fingerprint) uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.catalog.Of(fp).Epoch
}

// Catalog returns a copy of the catalog.
func (n *Names) Catalog() *catalog.Catalog {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.catalog.Clone()
}

// Report fills in the counts of resets. r.Tiers are the tiers of Open.
func (n *Names) Report(r *pool.TierReport) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r.Adopted, r.Again = n.mu.adopted, n.mu.again
	for i, t := range n.tiers {
		r.Tiers[i].MarkFails = t.markFails.Load()
	}
}
