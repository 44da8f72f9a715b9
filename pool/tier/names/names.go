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
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Tier is a tier in which spaces have names. Its functions are called concurrently, without locks.
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
	// Adopted resets a space in memory, after another node's reset has given it a new name.
	Adopted func(pool.Fingerprint)
}

// Names holds the names of spaces in tiers. Its methods may be called concurrently.
//
// It has two locks, taken in this order, and the caller's lock of open spaces may be held between
// the two: Opened, Use and Closed take mu alone.
//
//	changeMu  held by one change of the catalog, from the change to the end of its write to disk,
//	          for saveWithin at most. A reset is in the file when Reset returns without an error.
//	          Holds no data; look-ups never wait for it.
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
	writing  chan struct{} // cap 1: a write to disk is in progress; one at a time, so the file never goes back

	mu struct {
		sync.Mutex
		catalog *catalog.Catalog
		dirty   bool                      // catalog differs from the file
		open    []pool.Fingerprint        // spaces that are open, in the order of opening
		off     map[pool.Fingerprint]bool // a reset was not saved: no tiers, even if opened again
		adopted uint64                    // resets of other nodes
		again   uint64                    // resets that another node's competed with
	}
}

// Open reads the catalog.
func Open(o Options, tiers []Tier) (n *Names, err error) {
	n = &Names{o: o, writing: make(chan struct{}, 1)}
	for _, t := range tiers {
		n.tiers = append(n.tiers, &tier{
			Tier: t, names: n, wake: make(chan struct{}, 1), states: make(map[pool.Fingerprint]markerState),
		})
	}
	n.mu.off = map[pool.Fingerprint]bool{}
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
	return Name{Stored: catalog.StoredName(fp, e.Epoch), Off: n.mu.off[fp] || e.Forget || e.Epoch == catalog.MaxEpoch}
}

// Closed records that a space is no longer open.
func (n *Names) Closed(fp pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.open = slices.DeleteFunc(n.mu.open, func(other pool.Fingerprint) bool { return other == fp })
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

// Reset gives a space its next name, and returns after that is on disk. After an error the space is
// Off until a later write to disk succeeds; the caller must not report the reset as done.
func (n *Names) Reset(fp pool.Fingerprint) error {
	return n.rename(fp, func(e *catalog.Space) { n.claimEpoch(e, e.Epoch+1) })
}

// claimEpoch sets an epoch as a reset of this node, with a claim if any tier is shared: other nodes
// may claim the epoch too. In the last epoch the tiers are off.
func (n *Names) claimEpoch(e *catalog.Space, epoch uint64) {
	e.Epoch, e.Claim, e.Confirmed = min(epoch, catalog.MaxEpoch), catalog.Nonce{}, nil
	if e.Epoch < catalog.MaxEpoch && slices.ContainsFunc(n.tiers, func(t *tier) bool { return !t.Local }) {
		e.Claim = catalog.NewNonce()
	}
}

// rename gives a space another epoch, and so another name in the tiers, and saves the catalog. The
// tiers are not used for the space before it is on disk.
func (n *Names) rename(fp pool.Fingerprint, change func(*catalog.Space)) error {
	n.changeMu.Lock()
	defer n.changeMu.Unlock()
	n.change(fp, change)
	n.o.Resetting(fp)
	return n.save()
}

// change updates a space in the catalog. Until the catalog is saved the space is off in all tiers,
// whether it is open now or opened meanwhile.
func (n *Names) change(fp pool.Fingerprint, change func(*catalog.Space)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.off[fp] = true
	e := n.mu.catalog.Of(fp)
	change(&e)
	e.Forget = true
	n.mu.catalog.Put(fp, e, n.mu.open)
	n.mu.dirty = true
}

// Unforgotten returns the spaces whose resets are on disk, and whose memory an earlier process may
// not have reset before it was killed.
func (n *Names) Unforgotten() (all []pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for fp, e := range n.mu.catalog.Spaces {
		if e.Forget {
			all = append(all, fp)
		}
	}
	return all
}

// Forgotten records that memory was reset after the space had got this tier epoch. It is on disk
// later: until then a next process resets memory once more.
func (n *Names) Forgotten(fp pool.Fingerprint, epoch uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.mu.catalog.Spaces[fp]; e.Forget && e.Epoch == epoch {
		e.Forget = false
		n.mu.catalog.Spaces[fp], n.mu.dirty = e, true
	}
}

// save writes the catalog to disk; the caller holds changeMu. Spaces that were off only because the
// catalog was not on disk get their names in the tiers again.
func (n *Names) save() error {
	n.mu.Lock()
	now := n.mu.catalog.Clone()
	waited := maps.Clone(n.mu.off)
	n.mu.dirty = false
	n.mu.Unlock()
	if n.o.File != nil {
		if err := n.write(now); err != nil {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.mu.dirty = true
			return err
		}
	}
	n.mu.Lock()
	for fp := range waited {
		delete(n.mu.off, fp)
	}
	n.mu.Unlock()
	for fp := range waited {
		n.o.Changed(fp)
	}
	return nil
}

// saveWithin is how long each change waits for the disk: its caller may hold a session, and all
// look-ups of a socket.
const saveWithin = 2 * time.Second

var errSlow = fmt.Errorf("the disk did not take it within %v", saveWithin)

// write writes the catalog to disk. A write that takes longer than saveWithin continues, also after
// the names' end, and its result is ignored.
func (n *Names) write(now *catalog.Catalog) error {
	late := time.NewTimer(saveWithin)
	defer late.Stop()
	select {
	case n.writing <- struct{}{}:
	case <-late.C:
		return errSlow
	}
	written := make(chan error, 1)
	go func() {
		defer func() { <-n.writing }()
		written <- n.o.File.Write(now)
	}()
	select {
	case err := <-written:
		return err
	case <-late.C:
		return errSlow
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
