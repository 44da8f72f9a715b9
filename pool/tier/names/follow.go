package names

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// markerState is what is known of a space's markers in one store.
type markerState struct {
	epoch uint64    // below(epoch) was found or put there
	full  time.Time // when all of them are checked again
}

const (
	followSpaces = 256 // spaces of one round
	followKeys   = 16  // keys of one call, so that the store has room for look-ups
	maxSkipped   = 16  // markers of skipped epochs that a reset puts
)

// FullRound is of how many rounds of a follower one checks all markers of a space. The others ask
// for the next epoch alone.
const FullRound = 12

// Follow makes all followers begin a round.
func (n *Names) Follow() {
	for _, t := range n.tiers {
		if !t.Local {
			t.followNow()
		}
	}
}

func (t *tier) followNow() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// followLoop runs a follower until ctx ends. It counts failures and tries again in the next round;
// they do not count for the breaker, since no look-up waits.
func (t *tier) followLoop(ctx context.Context) {
	tick := time.NewTicker(t.names.o.EpochEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-t.wake:
		}
		if !t.Up() {
			continue
		}
		if err := t.followRound(ctx); err != nil && ctx.Err() == nil {
			t.markFails.Add(1)
			t.Log("reading or writing markers failed, will retry", err)
		}
	}
}

// followedSpace is a space in one round of a follower.
type followedSpace struct {
	fp pool.Fingerprint
	catalog.Space
	claims bool // its reset may not have won in this store yet
	full   bool // check all markers, not just the next epoch's
}

// spacesToFollow returns some of the spaces that are open or whose markers this store may lack.
func (t *tier) spacesToFollow() (round []followedSpace) {
	all := t.allToFollow()
	if len(all) <= followSpaces {
		return all
	}
	t.next = (t.next + followSpaces) % len(all)
	return append(all[t.next:], all[:t.next]...)[:followSpaces]
}

func (t *tier) allToFollow() (all []followedSpace) {
	n := t.names
	now := n.o.Clock()
	add := func(fp pool.Fingerprint, e catalog.Space, open bool) {
		h, ok := t.states[fp]
		one := followedSpace{fp: fp, Space: e, claims: e.Claim != (catalog.Nonce{}) &&
			!slices.Contains(e.Confirmed, t.Name)}
		confirmed := ok && h.epoch == e.Epoch && !one.claims
		one.full = !confirmed || !now.Before(h.full)
		if open || e.Epoch > 0 && !confirmed {
			all = append(all, one)
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	open := make(map[pool.Fingerprint]bool)
	for _, fp := range n.mu.open {
		open[fp] = true
		add(fp, n.mu.catalog.Of(fp), true)
	}
	for fp, e := range n.mu.catalog.Spaces {
		if !open[fp] {
			add(fp, e, false)
		}
	}
	for fp := range t.states {
		if _, ok := n.mu.catalog.Spaces[fp]; !ok && !open[fp] {
			delete(t.states, fp)
		}
	}
	return all
}

// followRound asks for the next epoch of all spaces together, and checks all markers of those for
// which that is not enough. A store that takes no marker of one space still tells of the others.
func (t *tier) followRound(ctx context.Context) error {
	var near []followedSpace
	var keys []pool.Key
	var refused error
	follow := func(f *followedSpace) error {
		err := t.followSpace(ctx, f)
		if errors.Is(err, errNoMarker) {
			refused, err = err, nil
		}
		return err
	}
	for _, f := range t.spacesToFollow() {
		if f.full {
			if err := follow(&f); err != nil {
				return err
			}
			continue
		}
		near, keys = append(near, f), append(keys, catalog.MarkerKey(f.fp, f.Epoch+1))
	}
	status, err := t.askMarkers(ctx, keys)
	for i := range status {
		if status[i] != pool.OK {
			continue
		}
		if err := follow(&near[i]); err != nil {
			return err
		}
	}
	return errors.Join(refused, err)
}

// followSpace checks all markers of a space. It adopts a later epoch, or puts the markers that the
// store lacks.
func (t *tier) followSpace(ctx context.Context, f *followedSpace) error {
	epochs := append(catalog.Above(f.Epoch), catalog.Below(f.Epoch)...)
	keys := make([]pool.Key, len(epochs))
	for i, epoch := range epochs {
		keys[i] = catalog.MarkerKey(f.fp, epoch)
	}
	status, err := t.askMarkers(ctx, keys)
	if err != nil {
		return err
	}
	last := uint64(0)
	var missing []uint64
	for i, epoch := range epochs {
		switch {
		case epoch > f.Epoch && status[i] == pool.OK:
			last = max(last, epoch)
		case epoch <= f.Epoch && status[i] != pool.OK && !(f.claims && epoch == f.Epoch):
			missing = append(missing, epoch)
		}
	}
	if last > 0 {
		t.names.advance(f, last)
		t.followNow() // there may be a later one
		return nil
	}
	if f.claims {
		switch won, err := t.claim(ctx, f); {
		case err != nil:
			return err
		case !won:
			t.names.advance(f, f.Epoch)
			t.followNow()
			return nil
		}
		t.names.confirmClaim(f, t)
		missing = append(missing, t.skippedEpochs(f)...)
	}
	if err := t.putMarkers(ctx, f.fp, missing); err != nil {
		return err
	}
	t.states[f.fp] = markerState{epoch: f.Epoch, full: t.names.o.Clock().Add(FullRound * t.names.o.EpochEvery)}
	return nil
}

// skippedEpochs returns the latest epochs between the last one this store has a marker of and a new
// reset's, so that nodes that ask for the next epoch alone find it in their next round.
func (t *tier) skippedEpochs(f *followedSpace) (all []uint64) {
	from := f.Epoch - min(f.Epoch, maxSkipped)
	if h, ok := t.states[f.fp]; ok {
		from = max(from, h.epoch)
	}
	for epoch := from + 1; epoch < f.Epoch; epoch++ {
		all = append(all, epoch)
	}
	return all
}

// advance takes a space to the epoch of a marker, or, if a reset of this node competed with it, to
// the epoch after it. It is counted when memory has been reset too.
func (n *Names) advance(f *followedSpace, marker uint64) {
	err := n.rename(f.fp, func(e *catalog.Space) {
		switch {
		case f.claims:
			n.claimEpoch(e, max(e.Epoch, marker)+1)
		case marker > e.Epoch:
			e.Epoch, e.Claim, e.Confirmed = marker, catalog.Nonce{}, nil
		}
	})
	if err != nil {
		n.o.Log("saving a reset by another node failed: the tiers are not used for the space until it is saved", err)
	}
	n.o.Adopted(f.fp)
	n.mu.Lock()
	defer n.mu.Unlock()
	if f.claims {
		n.mu.again++
	} else {
		n.mu.adopted++
	}
}

// confirmClaim records that a tier has the marker of this node's reset.
func (n *Names) confirmClaim(f *followedSpace, t *tier) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.mu.catalog.Spaces[f.fp]
	if e.Epoch != f.Epoch || e.Claim != f.Claim {
		return // it was reset again
	}
	e.Confirmed = append(slices.Clone(e.Confirmed), t.Name)
	open := func(other *tier) bool { return !other.Local && !slices.Contains(e.Confirmed, other.Name) }
	if !slices.ContainsFunc(n.tiers, open) {
		e.Claim, e.Confirmed = catalog.Nonce{}, nil
	}
	n.mu.catalog.Spaces[f.fp] = e
	n.mu.dirty = true
}

// Markers tell other nodes of resets. A reset puts a marker into each shared store, under a key
// made of the space's fingerprint and the epoch. Its existence is the message: nodes ask for
// markers beyond their own epochs, adopt the highest, and put back those that a store lost. One
// marker for an epoch is not enough, since a store may lose any of them and a node may miss any
// number of resets; asking for all has no bound. As in a Fenwick tree, a node in epoch m keeps the
// markers of
//
//	below(m) = m, m - lowbit(m), ...            at most 32 of them
//
// and a node in epoch n asks for those of
//
//	above(n) = n+1, (n+1) + lowbit(n+1), ...    at most 32 of them
//
// For every n < m the two sets share exactly one number, and it is above n: whatever was lost, a
// node that asks finds some later epoch, and after a few rounds the last one.
//
// The value of a marker names the reset that put it, and the first marker wins. If two nodes reset
// at once, the one that finds the other's marker resets again; what either stored before is then
// found by neither.

// markerValue returns the value of a marker: a header, and the nonce of the reset that made the
// epoch, or zero if a node puts back a marker that the store lost.
func (n *Names) markerValue(key *pool.Key, claim catalog.Nonce) []byte {
	value := append(make([]byte, transit.HeaderBytes), claim[:]...)
	length := uint32(len(claim))
	hd := transit.Header{
		Length: length,
		Sum:    pool.Sum(key.Seed(length), claim[:]),
		Node:   n.o.Node,
		When:   uint64(n.o.Clock().Unix()),
	}
	hd.Seal(key, value)
	return value
}

// askMarkers calls Exists in small batches. Keys that were not asked for keep Busy.
func (t *tier) askMarkers(ctx context.Context, keys []pool.Key) ([]pool.Status, error) {
	status := make([]pool.Status, len(keys))
	for i := range status {
		status[i] = pool.Busy
	}
	for from := 0; from < len(keys); from += followKeys {
		to := min(from+followKeys, len(keys))
		within, stop := context.WithTimeout(ctx, t.Within)
		err := t.Store.Exists(within, keys[from:to], status[from:to])
		stop()
		if err != nil {
			return status, err
		}
	}
	return status, nil
}

var errNoMarker = errors.New("the store neither took nor returned the marker of a reset")

// claim puts the marker of this node's reset, of which the first wins. An error leaves it unknown.
func (t *tier) claim(ctx context.Context, f *followedSpace) (won bool, err error) {
	key := catalog.MarkerKey(f.fp, f.Epoch)
	value := t.names.markerValue(&key, f.Claim)
	items := []pool.Item{{Key: key, Data: value, Status: pool.Busy}}
	within, stop := context.WithTimeout(ctx, t.Within)
	defer stop()
	if err := t.Store.Put(within, items); err != nil || items[0].Status == pool.OK {
		return err == nil, err
	}
	if items[0].Status != pool.Exists {
		return false, errNoMarker
	}
	there := []pool.Item{{Key: key, Data: make([]byte, len(value)), Status: pool.Busy}}
	if err := t.Store.Get(within, there); err != nil {
		return false, err
	}
	switch there[0].Status {
	case pool.OK:
		_, bad := transit.Verify(&key, &key, there[0].Data)
		return bad == nil && catalog.Nonce(there[0].Data[transit.HeaderBytes:]) == f.Claim, nil
	case pool.Corrupt, pool.Invalid:
		return false, nil // not readable, so not known to be ours
	}
	return false, errNoMarker
}

// putMarkers puts markers that a store lost.
func (t *tier) putMarkers(ctx context.Context, fp pool.Fingerprint, epochs []uint64) error {
	if len(epochs) == 0 {
		return nil
	}
	items := make([]pool.Item, len(epochs))
	for i, epoch := range epochs {
		key := catalog.MarkerKey(fp, epoch)
		items[i] = pool.Item{Key: key, Data: t.names.markerValue(&key, catalog.Nonce{}), Status: pool.Busy}
	}
	within, stop := context.WithTimeout(ctx, t.Within)
	defer stop()
	if err := t.Store.Put(within, items); err != nil {
		return err
	}
	for i := range items {
		if items[i].Status != pool.OK && items[i].Status != pool.Exists {
			return errNoMarker
		}
	}
	return nil
}
