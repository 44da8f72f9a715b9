package tier

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

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

// following is the state of a level's follower. Other goroutines use wake only.
type following struct {
	wake   chan struct{}                    // cap 1
	states map[pool.Fingerprint]markerState // the markers of each space
	next   int                              // where the next round begins

	marked map[pool.Key]time.Time // use marks that the store has, and until when that is believed
}

// markerState is what is known of a space's markers in one store.
type markerState struct {
	epoch uint64    // below(epoch) was found or put there
	full  time.Time // when all of them are checked again
}

const (
	followSpaces = 256 // spaces of one round
	followKeys   = 16  // keys of one call, so that the store has room for look-ups
	followFull   = 12  // rounds of which one checks all of above and below, the others the next epoch
)

// markerValue returns the value of a marker: a header, and the nonce of the reset that made the
// epoch, or zero if a node puts back a marker that the store lost.
func (p *Pool) markerValue(key *pool.Key, claim catalog.Nonce) []byte {
	value := append(make([]byte, transit.HeaderBytes), claim[:]...)
	n := uint32(len(claim))
	hd := transit.Header{
		Length: n,
		Sum:    pool.Sum(key.Seed(n), claim[:]),
		Node:   p.o.Node,
		When:   uint64(p.now().Unix()),
	}
	hd.Seal(key, value)
	return value
}

// follow wakes all followers.
func (p *Pool) follow() {
	for _, l := range p.levels {
		if !l.Local {
			l.followNow()
		}
	}
}

func (l *level) followNow() {
	select {
	case l.following.wake <- struct{}{}:
	default:
	}
}

// followLoop runs a follower until ctx ends. It counts failures and tries again in the next round;
// they do not count for the breaker, since no look-up waits.
func (l *level) followLoop(ctx context.Context) {
	tick := time.NewTicker(l.p.o.EpochEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-l.following.wake:
		}
		if !l.up() {
			continue
		}
		if err := errors.Join(l.followRound(ctx), l.markRound(ctx)); err != nil && ctx.Err() == nil {
			l.count.markFails.Add(1)
			l.logLimited("reading or writing markers failed, will retry", err)
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

// spacesToFollow returns at most followSpaces spaces: those that are open, those with orphans, and
// those whose markers this store may lack. A store that lost the markers of a closed space gets
// them back before what new nodes store under its earlier names is collected.
func (l *level) spacesToFollow() (round []followedSpace) {
	s := &l.p.spaces
	f := &l.following
	now := l.p.now()
	var all []followedSpace
	add := func(fp pool.Fingerprint, e catalog.Space, always bool) {
		h, ok := f.states[fp]
		one := followedSpace{fp: fp, Space: e, claims: e.Claim != (catalog.Nonce{}) &&
			!slices.Contains(e.Confirmed, l.Name)}
		confirmed := ok && h.epoch == e.Epoch && !one.claims
		one.full = !confirmed || !now.Before(h.full)
		if always || e.Epoch > 0 && !confirmed {
			all = append(all, one)
		}
	}
	s.mu.Lock()
	open := make(map[pool.Fingerprint]bool)
	for _, sp := range *s.all.Load() {
		if sp != nil && !open[sp.spec.Fingerprint] {
			open[sp.spec.Fingerprint] = true
			if !s.retired[sp.spec.Fingerprint] { // else its markers are collected and must not be put back
				add(sp.spec.Fingerprint, s.catalog.Spaces[sp.spec.Fingerprint], true)
			}
		}
	}
	left := make(map[pool.Fingerprint]bool)
	for _, one := range s.catalog.Orphans {
		left[one.Space] = true
	}
	for fp, e := range s.catalog.Spaces {
		if !open[fp] && !s.retired[fp] {
			add(fp, e, left[fp])
		}
	}
	for fp := range f.states {
		if _, ok := s.catalog.Spaces[fp]; !ok && !open[fp] {
			delete(f.states, fp)
		}
	}
	s.mu.Unlock()
	if len(all) <= followSpaces {
		return all
	}
	f.next = (f.next + followSpaces) % len(all)
	return append(all[f.next:], all[:f.next]...)[:followSpaces]
}

// followRound asks for the next epoch of all spaces together, and checks all markers of those for
// which that is not enough.
func (l *level) followRound(ctx context.Context) error {
	var near []followedSpace
	var keys []pool.Key
	for _, f := range l.spacesToFollow() {
		if f.full {
			if err := l.followSpace(ctx, &f); err != nil {
				return err
			}
			continue
		}
		near, keys = append(near, f), append(keys, catalog.MarkerKey(f.fp, f.Epoch+1))
	}
	status, err := l.askMarkers(ctx, keys)
	for i := range status {
		if status[i] != pool.OK {
			continue
		}
		if err := l.followSpace(ctx, &near[i]); err != nil {
			return err
		}
	}
	return err
}

// askMarkers calls Exists in small batches. Keys that were not asked for keep Busy.
func (l *level) askMarkers(ctx context.Context, keys []pool.Key) ([]pool.Status, error) {
	status := make([]pool.Status, len(keys))
	for i := range status {
		status[i] = pool.Busy
	}
	for from := 0; from < len(keys); from += followKeys {
		to := min(from+followKeys, len(keys))
		within, stop := context.WithTimeout(ctx, l.PutWithin)
		err := l.Store.Exists(within, keys[from:to], status[from:to])
		stop()
		if err != nil {
			return status, err
		}
	}
	return status, nil
}

// followSpace checks all markers of a space. It adopts a later epoch, or puts the markers that the
// store lacks.
func (l *level) followSpace(ctx context.Context, f *followedSpace) error {
	numbers := append(catalog.Above(f.Epoch), catalog.Below(f.Epoch)...)
	keys := make([]pool.Key, len(numbers))
	for i, n := range numbers {
		keys[i] = catalog.MarkerKey(f.fp, n)
	}
	status, err := l.askMarkers(ctx, keys)
	if err != nil {
		return err
	}
	last := uint64(0)
	var missing []uint64
	for i, n := range numbers {
		switch {
		case n > f.Epoch && status[i] == pool.OK:
			last = max(last, n)
		case n <= f.Epoch && status[i] != pool.OK && !(f.claims && n == f.Epoch):
			missing = append(missing, n)
		}
	}
	if last > 0 {
		l.p.advance(f, last)
		l.followNow() // there may be a later one
		return nil
	}
	if f.claims {
		switch won, err := l.claim(ctx, f); {
		case err != nil:
			return err
		case !won:
			l.p.advance(f, f.Epoch)
			l.followNow()
			return nil
		}
		l.p.spaces.confirmClaim(f, l)
		missing = append(missing, l.skippedEpochs(f)...)
	}
	if err := l.putMarkers(ctx, f.fp, missing); err != nil {
		return err
	}
	l.following.states[f.fp] = markerState{epoch: f.Epoch, full: l.p.now().Add(followFull * l.p.o.EpochEvery)}
	return nil
}

// skippedEpochs returns the latest epochs between the last one this store has a marker of and a new
// reset's, so that nodes that ask for the next epoch alone find it in their next round.
func (l *level) skippedEpochs(f *followedSpace) (all []uint64) {
	from := f.Epoch - min(f.Epoch, maxOldNames)
	if h, ok := l.following.states[f.fp]; ok {
		from = max(from, h.epoch)
	}
	for n := from + 1; n < f.Epoch; n++ {
		all = append(all, n)
	}
	return all
}

// advance takes a space to the epoch of a marker, or, if a reset of this node competed with it, to
// the epoch after it.
func (p *Pool) advance(f *followedSpace, marker uint64) {
	p.spaces.mu.Lock()
	if f.claims {
		p.spaces.again++
	} else {
		p.spaces.adopted++
	}
	then := p.spaces.onAdopted
	p.spaces.mu.Unlock()
	err := p.rename(f.fp, func(e *catalog.Space) error {
		switch {
		case f.claims:
			return p.claimEpoch(e, max(e.Epoch, marker)+1)
		case marker > e.Epoch:
			e.Epoch, e.Claim, e.Confirmed = marker, catalog.Nonce{}, nil
		}
		return nil
	})
	if err != nil {
		p.o.Log("", "saving a reset by another node failed: the tiers are not used for the space until it is saved",
			err)
	}
	if err := p.forgetMemory(f.fp); err != nil {
		p.o.Log("", "a reset by another node could not be applied to memory", err)
	}
	if _, open := p.openID(f.fp); open && then != nil {
		then(f.fp)
	}
}

var errNoMarker = errors.New("the store neither took nor returned the marker of a reset")

// claim puts the marker of this node's reset. The first marker of an epoch wins. After an error the
// outcome is unknown.
func (l *level) claim(ctx context.Context, f *followedSpace) (won bool, err error) {
	key := catalog.MarkerKey(f.fp, f.Epoch)
	value := l.p.markerValue(&key, f.Claim)
	items := []pool.Item{{Key: key, Data: value, Status: pool.Busy}}
	within, stop := context.WithTimeout(ctx, l.PutWithin)
	defer stop()
	if err := l.Store.Put(within, items); err != nil || items[0].Status == pool.OK {
		return err == nil, err
	}
	if items[0].Status != pool.Exists {
		return false, errNoMarker
	}
	there := []pool.Item{{Key: key, Data: make([]byte, len(value)), Status: pool.Busy}}
	if err := l.Store.Get(within, there); err != nil {
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
func (l *level) putMarkers(ctx context.Context, fp pool.Fingerprint, epochs []uint64) error {
	if len(epochs) == 0 {
		return nil
	}
	keys := make([]pool.Key, len(epochs))
	for i, n := range epochs {
		keys[i] = catalog.MarkerKey(fp, n)
	}
	return l.putMarkerKeys(ctx, keys)
}

func (l *level) putMarkerKeys(ctx context.Context, keys []pool.Key) error {
	items := make([]pool.Item, len(keys))
	for i, key := range keys {
		items[i] = pool.Item{Key: key, Data: l.p.markerValue(&key, catalog.Nonce{}), Status: pool.Busy}
	}
	within, stop := context.WithTimeout(ctx, l.PutWithin)
	defer stop()
	if err := l.Store.Put(within, items); err != nil {
		return err
	}
	for i := range items {
		if items[i].Status != pool.OK && items[i].Status != pool.Exists {
			return errNoMarker
		}
	}
	return nil
}

// confirmClaim records that a tier has the marker of this node's reset.
func (s *spaces) confirmClaim(f *followedSpace, l *level) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.catalog.Spaces[f.fp]
	if e.Epoch != f.Epoch || e.Claim != f.Claim {
		return // it was reset again
	}
	e.Confirmed = append(slices.Clone(e.Confirmed), l.Name)
	open := func(other *level) bool { return !other.Local && !slices.Contains(e.Confirmed, other.Name) }
	if !slices.ContainsFunc(l.p.levels, open) {
		e.Claim, e.Confirmed = catalog.Nonce{}, nil
	}
	s.catalog.Spaces[f.fp] = e
	s.dirty = true
}
