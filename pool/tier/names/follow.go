package names

import (
	"context"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
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

// spacesToFollow returns at most followSpaces spaces: those that are open, and those whose markers
// this store may lack.
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
// which that is not enough.
func (t *tier) followRound(ctx context.Context) error {
	var near []followedSpace
	var keys []pool.Key
	for _, f := range t.spacesToFollow() {
		if f.full {
			if err := t.followSpace(ctx, &f); err != nil {
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
		if err := t.followSpace(ctx, &near[i]); err != nil {
			return err
		}
	}
	return err
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
	err := n.rename(f.fp, func(e *catalog.Space) error {
		switch {
		case f.claims:
			return n.claimEpoch(e, max(e.Epoch, marker)+1)
		case marker > e.Epoch:
			e.Epoch, e.Claim, e.Confirmed = marker, catalog.Nonce{}, nil
		}
		return nil
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
