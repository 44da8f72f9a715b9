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

// How nodes hear of resets. A reset puts a marker into each shared store, under a key that is made
// of the fingerprint and the epoch, in a space that no engine has. That it exists says all; nodes
// ask for the markers beyond their own epochs, take over the highest, and put it back where a store
// lost it. A store may lose any of them, and a node may have been away for any number of resets, so
// one marker for an epoch is not enough, and to ask for all would have no bound. As in a Fenwick
// tree, a node in epoch m keeps the markers of
//
//	below(m) = m, m - lowbit(m), ...            at most 32 of them
//
// and one in epoch n asks for those of
//
//	above(n) = n+1, (n+1) + lowbit(n+1), ...    at most 32 of them
//
// For every n < m the two have exactly one number in common, and it is beyond n: so whatever else
// was lost, a node that asks hears of some later epoch, and after a few questions of the last.
//
// The value of a marker names the reset that put it: the first one wins, so of two nodes that reset
// at once one finds that its epoch is another's, and resets once more: what either stored before is
// found by neither afterwards.

// following is what the follower of a lane remembers. Only kick is used by others.
type following struct {
	kick  chan struct{} // cap 1
	heard map[pool.Fingerprint]heard
	turn  int // where the next round begins

	marked map[pool.Key]time.Time // use marks that are there: until when that is believed
}

// heard is what is known of a space's markers in one store.
type heard struct {
	epoch uint64    // below(epoch) was there, or was put there
	full  time.Time // when all of it is looked at again
}

const (
	followSpaces = 256 // spaces of one round
	followKeys   = 16  // keys of one call, so that the store has room for look-ups
	followFull   = 12  // rounds in one of which all of above and below is asked for; in the others the next epoch alone
)

// markerValue is a value as every other: its header, and the nonce of the reset that made the
// epoch; zero if it was put back by a node that heard of it.
func (p *Pool) markerValue(key *pool.Key, claim catalog.Nonce) []byte {
	value := append(make([]byte, transit.HeaderBytes), claim[:]...)
	n := uint32(len(claim))
	hd := transit.Header{Length: n, Sum: pool.Sum(key.Seed(n), claim[:]), Node: p.o.Node, When: uint64(p.now().Unix())}
	hd.Seal(key, value)
	return value
}

// follow has the followers look now.
func (p *Pool) follow() {
	for _, l := range p.lanes {
		if !l.Local {
			l.followNow()
		}
	}
}

func (l *lane) followNow() {
	select {
	case l.following.kick <- struct{}{}:
	default:
	}
}

// followAlways is the life of a follower. Failures are counted, and tried again in the next round;
// they do not count for the breaker, since no look-up waits.
func (l *lane) followAlways(ctx context.Context) {
	tick := time.NewTicker(l.p.o.EpochEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-l.following.kick:
		}
		if !l.up() {
			continue
		}
		if err := errors.Join(l.followRound(ctx), l.markRound(ctx)); err != nil && ctx.Err() == nil {
			l.count.markFails.Add(1)
			l.say("the markers of resets or of use are not read or not written: tried again", err)
		}
	}
}

// followed is a space as a round finds it.
type followed struct {
	fp pool.Fingerprint
	catalog.Space
	claims bool // its reset is not known to have won in this store
	full   bool
}

// followed is the spaces that are open, those of which something waits to be collected, and those
// whose markers this store is not known to have, at most followSpaces. A store that lost the markers
// of a closed space is told again before what new nodes store under its earlier names is collected.
func (l *lane) followed() (round []followed) {
	s := &l.p.spaces
	f := &l.following
	now := l.p.now()
	var all []followed
	add := func(fp pool.Fingerprint, e catalog.Space, always bool) {
		h, known := f.heard[fp]
		one := followed{fp: fp, Space: e, claims: e.Claim != (catalog.Nonce{}) && !slices.Contains(e.Told, l.Name)}
		told := known && h.epoch == e.Epoch && !one.claims
		one.full = !told || !now.Before(h.full)
		if always || e.Epoch > 0 && !told {
			all = append(all, one)
		}
	}
	s.mu.Lock()
	open := make(map[pool.Fingerprint]bool)
	for _, sp := range *s.all.Load() {
		if sp != nil && !open[sp.spec.Fingerprint] {
			open[sp.spec.Fingerprint] = true
			if !s.retired[sp.spec.Fingerprint] { // its markers are collected: they must not be put back
				add(sp.spec.Fingerprint, s.kept.Spaces[sp.spec.Fingerprint], true)
			}
		}
	}
	left := make(map[pool.Fingerprint]bool)
	for _, one := range s.kept.Leftovers {
		left[one.Space] = true
	}
	for fp, e := range s.kept.Spaces {
		if !open[fp] && !s.retired[fp] {
			add(fp, e, left[fp])
		}
	}
	for fp := range f.heard {
		if _, kept := s.kept.Spaces[fp]; !kept && !open[fp] {
			delete(f.heard, fp)
		}
	}
	s.mu.Unlock()
	if len(all) <= followSpaces {
		return all
	}
	f.turn = (f.turn + followSpaces) % len(all)
	return append(all[f.turn:], all[:f.turn]...)[:followSpaces]
}

// followRound asks for all spaces' next epochs together, and looks closely at those where that is
// not enough.
func (l *lane) followRound(ctx context.Context) error {
	var near []followed
	var keys []pool.Key
	for _, f := range l.followed() {
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

// askMarkers is Exists in small calls. What was not asked is Busy.
func (l *lane) askMarkers(ctx context.Context, keys []pool.Key) ([]pool.Status, error) {
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

// followSpace looks at all markers of a space that count: it goes to a later epoch that is there,
// or sees to it that the store says its own.
func (l *lane) followSpace(ctx context.Context, f *followed) error {
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
		l.p.goBeyond(f, last)
		l.followNow() // there may be one more
		return nil
	}
	if f.claims {
		switch won, err := l.claim(ctx, f); {
		case err != nil:
			return err
		case !won:
			l.p.goBeyond(f, f.Epoch)
			l.followNow()
			return nil
		}
		l.p.spaces.tell(f, l)
		missing = append(missing, l.passed(f)...)
	}
	if err := l.putMarkers(ctx, f.fp, missing); err != nil {
		return err
	}
	l.following.heard[f.fp] = heard{epoch: f.Epoch, full: l.p.now().Add(followFull * l.p.o.EpochEvery)}
	return nil
}

// passed is the epochs between the last that this store has heard of and a reset's, the latest of
// them: nodes that ask for the next one alone hear of it in their next round.
func (l *lane) passed(f *followed) (all []uint64) {
	from := f.Epoch - min(f.Epoch, leftNames)
	if h, known := l.following.heard[f.fp]; known {
		from = max(from, h.epoch)
	}
	for n := from + 1; n < f.Epoch; n++ {
		all = append(all, n)
	}
	return all
}

// goBeyond takes a space to a later epoch: that of a marker, or, if a reset of this node met it on
// its way, the one after it.
func (p *Pool) goBeyond(f *followed, marker uint64) {
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
			e.Epoch, e.Claim, e.Told = marker, catalog.Nonce{}, nil
		}
		return nil
	})
	if err != nil {
		p.o.Log("", "a reset of another node is not on disk: the tiers are not used for the space until it is", err)
	}
	if err := p.forgetMemory(f.fp); err != nil {
		p.o.Log("", "a reset of another node: memory does not forget", err)
	}
	if _, open := p.openID(f.fp); open && then != nil {
		then(f.fp)
	}
}

var errNoMarker = errors.New("the store took no marker of a reset, or gave none back")

// claim puts the marker of this node's reset. Of several that made one epoch the first wins. An
// error: it is not known yet.
func (l *lane) claim(ctx context.Context, f *followed) (won bool, err error) {
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
		return false, nil // whoever wrote it
	}
	return false, errNoMarker
}

// putMarkers puts markers that a store lost.
func (l *lane) putMarkers(ctx context.Context, fp pool.Fingerprint, epochs []uint64) error {
	if len(epochs) == 0 {
		return nil
	}
	keys := make([]pool.Key, len(epochs))
	for i, n := range epochs {
		keys[i] = catalog.MarkerKey(fp, n)
	}
	return l.putMarkerKeys(ctx, keys)
}

func (l *lane) putMarkerKeys(ctx context.Context, keys []pool.Key) error {
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

// tell notes that a tier knows this node's reset.
func (s *spaces) tell(f *followed, l *lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.kept.Spaces[f.fp]
	if e.Epoch != f.Epoch || e.Claim != f.Claim {
		return // it was reset again
	}
	e.Told = append(slices.Clone(e.Told), l.Name)
	open := func(other *lane) bool { return !other.Local && !slices.Contains(e.Told, other.Name) }
	if !slices.ContainsFunc(l.p.lanes, open) {
		e.Claim, e.Told = catalog.Nonce{}, nil
	}
	s.kept.Spaces[f.fp] = e
	s.dirty = true
}
