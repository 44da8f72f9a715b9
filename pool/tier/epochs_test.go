package tier

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/names"
)

// epoch returns the tier epoch of a node's space.
func (n *node) epoch() uint64 {
	return n.names.Catalog().Spaces[n.spec.Fingerprint].Epoch
}

// marked reports whether a store has the marker of the node's epoch; in epoch 0 there is none.
func (n *node) marked(store pool.Store) bool {
	n.t.Helper()
	epoch := n.epoch()
	return epoch == 0 || len(n.markers(store, epoch)) == 1
}

// markers returns which of some epochs have markers in a store.
func (n *node) markers(store pool.Store, epochs ...uint64) (there []uint64) {
	n.t.Helper()
	keys := make([]pool.Key, len(epochs))
	for i, e := range epochs {
		keys[i] = catalog.MarkerKey(n.spec.Fingerprint, e)
	}
	status := make([]pool.Status, len(keys))
	check(n.t, store.Exists(n.t.Context(), keys, status))
	for i := range status {
		if status[i] == pool.OK {
			there = append(there, epochs[i])
		}
	}
	return there
}

func (n *node) reset() {
	n.t.Helper()
	if _, err := n.ResetSpace(n.space); err != nil {
		n.t.Fatal(err)
	}
}

// sharing is a tier that tests of resets have in common.
func sharing(store pool.Store) Tier { return Tier{Name: "shared", Store: store, Write: OnSave} }

// TestSharingGoesOnAfterAReset checks that after a reset its own node finds nothing older at once,
// and other nodes find nothing older after an interval. From then on they share under the new name.
func TestSharingGoesOnAfterAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		a := newNode(t, 200, 2, Options{Node: "a"}, sharing(store))
		b := newNode(t, 200, 2, Options{Node: "b"}, sharing(store))
		var adopted atomic.Int32
		b.OnAdopted(func(fp pool.Fingerprint) {
			if adopted.Add(1); fp != b.spec.Fingerprint {
				t.Errorf("adopted for %x", fp)
			}
		})
		old, fresh := chain("old", 10), chain("fresh", 10)
		a.save(old)
		a.stored(0, 10)
		if got := b.know(old); got != 10 {
			t.Fatalf("%d blocks are shared before the reset, want 10", got)
		}
		b.save(chain("of b", 3))
		b.stored(0, 3) // what a reset finds in the queue is not written
		a.reset()
		if got := a.know(old); got != 0 {
			t.Errorf("%d blocks of before the reset are found by the node that was reset", got)
		}
		time.Sleep(b.o.EpochEvery)
		synctest.Wait()
		if got := b.know(old) + b.know(chain("of b", 3)); got != 0 || b.Epoch(b.space) != 2 || adopted.Load() != 1 {
			t.Errorf("%d blocks of before the reset are found by another node, in epoch %d; told %d times",
				got, b.Epoch(b.space), adopted.Load())
		}
		b.save(fresh)
		b.stored(0, 13)
		fp := a.spec.Fingerprint
		if got := a.know(fresh); got != 10 || a.StoredAs(fp) != b.StoredAs(fp) || a.epoch() != 1 {
			t.Errorf("%d blocks are shared after the reset, want 10, in epoch 1; it is %d", got, a.epoch())
		}
		if r := a.Report(); r.Adopted+r.Again != 0 {
			t.Errorf("the node that was reset: %+v", r)
		}
		for range 3 { // of which the store may hear of the last alone
			a.reset()
		}
		time.Sleep(b.o.EpochEvery)
		synctest.Wait()
		if a.epoch() != 4 || b.epoch() != 4 {
			t.Errorf("epochs %d and %d after three resets in a row and an interval, want 4", a.epoch(), b.epoch())
		}
	})
}

// TestTwoResetsAtOnce checks that two nodes that reset while neither reaches the store end in one
// epoch, in which nothing that either stored before is found: the second one resets again.
func TestTwoResetsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		first, second := &moody{Store: store}, &moody{Store: store}
		a := newNode(t, 200, 2, Options{Node: "a"}, sharing(first))
		b := newNode(t, 200, 2, Options{Node: "b"}, sharing(second))
		time.Sleep(time.Second) // both have looked
		breaks(b, second)
		a.reset()
		between := chain("between", 10)
		a.save(between)
		a.stored(0, 10)
		b.reset()
		mends(b, second)
		time.Sleep(3 * a.o.EpochEvery)
		synctest.Wait()
		if a.epoch() != 2 || b.epoch() != 2 || b.Report().Again != 1 || a.Report().Adopted != 1 {
			t.Errorf("epochs %d and %d, want 2; %+v", a.epoch(), b.epoch(), b.Report())
		}
		if got := b.know(between) + a.know(between); got != 0 {
			t.Errorf("%d blocks of before the second reset are found", got)
		}
		b.save(between)
		b.stored(0, 10)
		time.Sleep(a.levels[0].AbsentFor)
		if got := a.know(between); got != 10 {
			t.Errorf("%d blocks are shared, want 10", got)
		}
	})
}

// TestAfterAWeekAndALossOfMarkers checks that a node that missed many resets, of which the store
// lost all markers, learns of the last one as soon as the store is back.
func TestAfterAWeekAndALossOfMarkers(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a week of several nodes")
	}
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		away := &moody{Store: store}
		a := newNode(t, 200, 2, Options{Node: "a"}, sharing(store))
		b := newNode(t, 200, 2, Options{Node: "b"}, sharing(away))
		time.Sleep(time.Second)
		breaks(b, away)
		for range 11 {
			a.reset()
			time.Sleep(time.Second)
		}
		time.Sleep(7 * 24 * time.Hour)
		for e := range uint64(12) { // as a server without persistence that is started again, or one that evicts
			check(t, store.Delete(t.Context(), []pool.Key{catalog.MarkerKey(a.spec.Fingerprint, e)}))
		}
		time.Sleep(2 * names.FullRound * a.o.EpochEvery)
		if got := a.markers(store, 8, 9, 10, 11); !slices.Equal(got, []uint64{8, 10, 11}) {
			t.Errorf("markers of %v are put back, want those of 8, 10 and 11", got)
		}
		mends(b, away)
		time.Sleep(2 * b.o.EpochEvery)
		synctest.Wait()
		if b.epoch() != 11 {
			t.Errorf("the node that was away is in epoch %d, want 11", b.epoch())
		}
		h := chain("a", 5)
		a.save(h)
		a.stored(0, 5)
		if got := b.know(h); got != 5 {
			t.Errorf("%d blocks are shared, want 5", got)
		}
	})
}

// TestResetWhileTheStoreIsDown checks that a reset while the store is down is published when the
// store is back, also across a restart of the agent.
func TestResetWhileTheStoreIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		away := &moody{Store: store}
		state := filepath.Join(t.TempDir(), "resets")
		a := newNode(t, 200, 2, Options{Node: "a", State: state}, sharing(away))
		b := newNode(t, 200, 2, Options{Node: "b"}, sharing(store))
		breaks(a, away)
		a.reset()
		if got := a.markers(store, 1); got != nil {
			t.Fatal("a store that is down has the marker")
		}
		check(t, a.Pool.Close())
		away.fails.Store(false)
		newNode(t, 200, 2, Options{Node: "a", State: state}, sharing(away))
		time.Sleep(2 * b.o.EpochEvery)
		synctest.Wait()
		if b.epoch() != 1 {
			t.Errorf("the other node is in epoch %d, want 1", b.epoch())
		}
	})
}

// readOnly is a store that refuses every put.
type readOnly struct{ pool.Store }

func (readOnly) Put(_ context.Context, items []pool.Item) error {
	for i := range items {
		items[i].Status = pool.Busy
	}
	return nil
}

// TestResetsAreHeardOfWhereNoneCanBeTold checks that a node that may only read a store, so that its
// own reset stays its own, still adopts those of others.
func TestResetsAreHeardOfWhereNoneCanBeTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		a := newNode(t, 200, 2, Options{Node: "a"}, sharing(store))
		b := newNode(t, 200, 2, Options{Node: "b"}, sharing(readOnly{store}))
		other, err := b.OpenSpace(specOf("another", 2))
		check(t, err)
		_, err = b.ResetSpace(other)
		check(t, err)
		time.Sleep(2 * b.o.EpochEvery)
		synctest.Wait()
		a.reset()
		time.Sleep(2 * b.o.EpochEvery)
		synctest.Wait()
		if b.epoch() != 1 {
			t.Errorf("epoch %d, want 1", b.epoch())
		}
	})
}

// TestOwnMarkerIsRecognised checks that a node that put its marker and died before it recorded that
// recognises the marker, and does not reset again.
func TestOwnMarkerIsRecognised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		state := filepath.Join(t.TempDir(), "resets")
		a := newNode(t, 200, 2, Options{State: state}, sharing(store))
		a.reset()
		before, err := os.ReadFile(state)
		check(t, err)
		synctest.Wait()
		if !a.marked(store) {
			t.Fatal("no marker")
		}
		check(t, a.Pool.Close())
		check(t, os.WriteFile(state, before, 0o600))
		again := newNode(t, 200, 2, Options{State: state}, sharing(store))
		time.Sleep(2 * again.o.EpochEvery)
		synctest.Wait()
		if r := again.Report(); again.epoch() != 1 || r.Again+r.Adopted != 0 {
			t.Errorf("epoch %d, %+v", again.epoch(), r)
		}
	})
}

// TestAdoptionThatIsNotKept checks that an epoch of another node that cannot be saved leaves the
// space without tiers until it can be.
func TestAdoptionThatIsNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		a := newNode(t, 200, 2, Options{}, sharing(store))
		disk := &moodyFile{File: catalog.File(filepath.Join(t.TempDir(), "resets"))}
		disk.fails.Store(true)
		b := newNode(t, 200, 2, Options{file: disk}, sharing(store))
		h := chain("a", 5)
		a.reset()
		a.save(h)
		time.Sleep(2 * b.o.EpochEvery)
		synctest.Wait()
		if got := b.know(h); got != 0 || !b.spaces.get(b.space).now.Load().off {
			t.Errorf("%d blocks found, though the epoch is not kept", got)
		}
		disk.fails.Store(false)
		time.Sleep(2 * b.o.EpochEvery)
		synctest.Wait()
		if got := b.know(h); got != 5 {
			t.Errorf("%d blocks found after the epoch was kept, want 5", got)
		}
	})
}

// TestResetOverADiskThatHangs checks that a reset does not wait for the disk for long: it takes
// effect without tiers, is reported as not done, and is saved once the disk works again.
func TestResetOverADiskThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := pooltest.NewShelf()
		disk := &hangingFile{File: catalog.File(filepath.Join(t.TempDir(), "resets")), works: make(chan struct{})}
		n := newNode(t, 200, 2, Options{file: disk, EpochEvery: time.Minute}, sharing(store))
		h := chain("a", 5)
		n.save(h)
		n.stored(0, 5)
		for range 2 {
			began := time.Now()
			if _, err := n.ResetSpace(n.space); err == nil || time.Since(began) > 5*time.Second {
				t.Errorf("%v after %v, want an error within 5 s", err, time.Since(began))
			}
			if got := n.load(h) + n.know(h); got != 0 {
				t.Errorf("%d blocks are found after a reset", got)
			}
		}
		close(disk.works)
		time.Sleep(2 * n.o.EpochEvery)
		synctest.Wait()
		if kept, err := disk.Read(); err != nil || kept.Of(n.spec.Fingerprint).Epoch != 2 {
			t.Errorf("epoch %d is kept, %v, want 2", kept.Of(n.spec.Fingerprint).Epoch, err)
		}
		n.save(h)
		n.stored(0, 10)
	})
}

// TestNoResetIsRefused checks that no reset is refused beyond the bound of the catalog: spaces that
// are not open make room. When one returns, or a space that was never kept opens, it has a name of
// no earlier epoch, and an open space keeps its name.
func TestNoResetIsRefused(t *testing.T) {
	local := Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave}
	full := catalog.New()
	gone := specOf("gone", 1)
	full.Spaces[gone.Fingerprint] = catalog.Space{Epoch: 3}
	for i := range catalog.MaxSpaces - 1 {
		fp := pool.Fingerprint{1, byte(i), byte(i >> 8), byte(i >> 16)}
		full.Spaces[fp] = catalog.Space{Epoch: 1}
	}
	n := newNode(t, 64, 1, Options{file: givenFile{full}}, local, sharing(pooltest.NewShelf()))
	check(t, n.Forget(pool.Fingerprint{9}))
	k := n.names.Catalog()
	if e := k.Spaces[pool.Fingerprint{9}]; e.Epoch != 1 {
		t.Errorf("the space that was reset is %+v", e)
	}
	if _, there := k.Spaces[gone.Fingerprint]; there {
		t.Error("a space that is not open is still there")
	}
	if n.StoredAs(n.spec.Fingerprint) != n.spec.Fingerprint {
		t.Error("an open space that was not reset has another name")
	}
	for _, spec := range []pool.Spec{gone, specOf("new", 1)} {
		id, err := n.OpenSpace(spec)
		check(t, err)
		if got := n.spaces.get(id).now.Load().stored; got != catalog.StoredName(spec.Fingerprint, 3) {
			t.Errorf("%s is stored as %x, want its name of epoch 3", spec.Identity, got)
		}
	}
}
