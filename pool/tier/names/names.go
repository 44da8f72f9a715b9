// Package names decides under which name each space is stored in tiers.
//
// A reset gives a space a new name, so that nothing stored before is found, however late it was
// written. Nodes agree on the names by markers in the shared tiers. Entries that tiers hold under
// names that no node uses any more are deleted.
//
//	Reset ──▶ next epoch, next name ──▶ catalog on disk ──▶ marker in each shared tier
//	                  │                                              │
//	                  └──▶ old name: an orphan                       ▼
//	                              │                followers of other nodes: the same name
//	private or named spaces that  ▼
//	no engine uses ──▶ orphans ──▶ collector: lists each tier, deletes
package names

import (
	"context"
	"sync"
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

	Up      func() bool                  // reports whether the store may be called
	Busy    func() bool                  // reports whether look-ups or fetches wait for the store
	Deleted func(keys []pool.Key)        // is called after the store deleted keys
	Log     func(what string, err error) // at most once a second for each what
}

// File keeps the catalog for the next process.
type File interface {
	Read() (*catalog.Catalog, error) // an empty one if there is none
	Write(k *catalog.Catalog) error  // returns after it is on disk
}

// Options of names. The tier package has their ranges; all but File are required.
type Options struct {
	File          File          // nil: the catalog ends with the process
	EpochEvery    time.Duration // between two rounds of a follower
	CollectAfter  time.Duration // from when a name becomes an orphan to its first scan, and to the second
	CollectUnused time.Duration // how long no node used a named space that is collected; 0: never
	CollectRate   int           // keys examined or deleted, a second
	Node          string        // names this node in markers
	Lasting       bool          // memory may outlive the process: Unforgotten is used
	Clock         func() time.Time
	Log           func(what string, err error)

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
//   - Nothing is stored under an orphan: Use removes the name from the orphans before it says that
//     the tiers may be used, and the name of an open space becomes an orphan only together with
//     another name or with Off.
//   - A space in off, unsaved or abandoned is Off. It leaves off and unsaved only after a write to
//     disk, and abandoned only when an engine uses it or nothing is left of it.
//   - An epoch never decreases while the catalog has the space. An abandoned space leaves it with
//     the last of its orphans, or to make room for another space.
type Names struct {
	o     Options
	tiers []*tier

	changed chan struct{} // cap 1: the catalog is to be saved, or has a new orphan

	changeMu sync.Mutex

	mu struct {
		sync.Mutex
		catalog   *catalog.Catalog
		dirty     bool                           // catalog differs from the file
		open      []pool.Fingerprint             // spaces that are open, in the order of opening
		unsaved   map[pool.Fingerprint]bool      // private or named spaces that the file lacks: no tiers until then
		off       map[pool.Fingerprint]bool      // a reset was not saved: no tiers, even if opened again
		failed    map[pool.Fingerprint]bool      // a reset found no new epoch: off until one does
		idle      map[pool.Fingerprint]time.Time // private spaces without an engine: since when
		active    map[pool.Fingerprint]bool      // named spaces with an engine
		abandoned map[pool.Fingerprint]bool      // spaces that are collected: no tiers until used
		adopted   uint64                         // resets of other nodes
		again     uint64                         // resets that another node's competed with
		lost      uint64                         // orphans that were not recorded
		unused    uint64                         // named spaces that were abandoned
		elsewhere uint64                         // of those, spaces that another node was found to use
	}

	started    time.Time
	loggedLost uint64    // of saveLoop
	loggedAt   time.Time // of saveLoop
}

// Open reads the catalog.
func Open(o Options, tiers []Tier) (*Names, error) {
	n := &Names{o: o, changed: make(chan struct{}, 1), started: o.Clock()}
	for _, t := range tiers {
		n.tiers = append(n.tiers, newTier(n, t))
	}
	n.mu.catalog = catalog.New()
	n.mu.unsaved, n.mu.off = map[pool.Fingerprint]bool{}, map[pool.Fingerprint]bool{}
	n.mu.failed, n.mu.active = map[pool.Fingerprint]bool{}, map[pool.Fingerprint]bool{}
	n.mu.idle, n.mu.abandoned = map[pool.Fingerprint]time.Time{}, map[pool.Fingerprint]bool{}
	if o.File == nil {
		return n, nil
	}
	return n, n.read()
}

// read reads the catalog of an earlier process, and gives the engines of that process CollectAfter
// to return.
func (n *Names) read() (err error) {
	if n.mu.catalog, err = n.o.File.Read(); err != nil {
		return err
	}
	back := n.started.Add(n.o.CollectAfter)
	for fp, e := range n.mu.catalog.Spaces {
		if e.Private {
			n.mu.idle[fp] = n.started
		}
	}
	fresh := false
	for name, left := range n.mu.catalog.Orphans {
		if left.NotBefore == 0 { // of format 1
			left.NotBefore, fresh = back.UnixMilli(), true
			n.mu.catalog.Orphans[name] = left
		}
		switch {
		case left.Unused && n.o.CollectUnused == 0:
			delete(n.mu.catalog.Orphans, name)
		case left.Unused:
			n.mu.abandoned[left.Space] = true
			left.NotBefore = max(left.NotBefore, back.UnixMilli())
			n.mu.catalog.Orphans[name] = left
		}
	}
	if fresh {
		return n.o.File.Write(n.mu.catalog)
	}
	return nil
}

// Run saves the catalog, follows the markers of other nodes and collects orphans, until ctx ends.
func (n *Names) Run(ctx context.Context) {
	var loops sync.WaitGroup
	defer loops.Wait()
	loops.Go(func() { n.saveLoop(ctx) })
	loops.Go(func() { n.collectLoop(ctx) })
	for _, t := range n.tiers {
		if !t.Local {
			loops.Go(func() { t.followLoop(ctx) })
		}
	}
}

func (n *Names) now() time.Time { return n.o.Clock() }

// pause waits for d. It returns false if the context ended first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
