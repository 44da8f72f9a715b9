package tier

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/names"
)

// fill fills the catalog but for one space with spaces that were used later than any other.
func (n *node) fill() {
	for i := range catalog.MaxSpaces - len(n.names.Catalog().Spaces) {
		n.InUse(pool.Fingerprint{0xee, byte(i), byte(i >> 8), byte(i >> 16)}, pool.PrivateGeneration)
	}
}

// TestClosedSpaceIsFollowedUntilItIsCollected checks that a shared store that lost the marker of a
// reset gets it back from a node that has closed the space, while names of earlier epochs wait to
// be collected. A new node learns of the epoch, and what it stores is not deleted.
func TestClosedSpaceIsFollowedUntilItIsCollected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		a := newNode(t, 200, 2, Options{Node: "a"}, sharing(store))
		a.reset()
		time.Sleep(2 * a.o.EpochEvery)
		synctest.Wait()
		check(t, a.CloseSpace(a.space))
		check(t, store.Delete(t.Context(), []pool.Key{catalog.MarkerKey(a.spec.Fingerprint, 1)}))
		b := newNode(t, 200, 2, Options{Node: "b"}, sharing(store))
		time.Sleep(2 * names.FullRound * a.o.EpochEvery)
		synctest.Wait()
		b.save(chain("b", 10))
		b.stored(0, 10)
		time.Sleep(4 * a.o.CollectAfter)
		synctest.Wait()
		got := store.count(b.StoredAs(b.spec.Fingerprint))
		if got != 20 || b.epoch() != 1 || a.Report().Names != 0 {
			t.Errorf("%d values of a new node are left, want 20, in epoch 1; it is %d; %+v", got, b.epoch(), a.Report())
		}
	})
}

// TestSpaceThatMadeRoomIsUsedByOthers checks that a space that one node's catalog dropped loses
// nothing in a shared tier, where another node uses it: its blocks and the markers of its epoch
// stay.
func TestSpaceThatMadeRoomIsUsedByOthers(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: as many spaces as a catalog has")
	}
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		local := &listing{Shelf: pooltest.NewShelf()}
		disk := Tier{Name: "disk", Store: local, Local: true, Write: OnSave}
		a := newNode(t, 200, 2, Options{Node: "a"}, disk, sharing(store))
		b := newNode(t, 200, 2, Options{Node: "b"}, sharing(store))
		a.reset()
		a.save(chain("a", 5))
		a.stored(0, 5)
		a.stored(1, 5)
		time.Sleep(2 * a.o.EpochEvery)
		synctest.Wait()
		check(t, a.CloseSpace(a.space))
		b.save(chain("b", 10))
		b.stored(0, 10)
		time.Sleep(4 * a.o.CollectAfter) // until nothing is left over of the reset
		synctest.Wait()
		name := catalog.StoredName(b.spec.Fingerprint, 1)
		before := store.count(name)
		if before == 0 || local.count(name) == 0 || a.Report().Names != 0 {
			t.Fatalf("%d and %d values, %+v", before, local.count(name), a.Report())
		}
		a.fill()
		a.InUse(pool.Fingerprint{1, 2, 3}, pool.PrivateGeneration)
		time.Sleep(4 * a.o.CollectAfter)
		synctest.Wait()
		if got := store.count(name); got != before || len(b.markers(store, 1)) != 1 {
			t.Errorf("%d of %d values that another node uses are left, and the markers of %v", got, before,
				b.markers(store, 1))
		}
		if got := local.count(name); got != 0 || a.Report().Names != 0 {
			t.Errorf("%d values of the space that made room are left in the local tier; %+v", got, a.Report())
		}
	})
}

// TestPrivateSpaceKeepsItsEpochToTheEnd checks that a private space that was reset keeps its epoch
// until its last name is collected. Otherwise it would return to a name that still has values.
func TestPrivateSpaceKeepsItsEpochToTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		n := newNode(t, 400, 2, Options{}, sharing(store))
		fp := n.spec.Fingerprint
		n.InUse(fp, pool.PrivateGeneration)
		n.save(chain("old", 10))
		n.stored(0, 10)
		n.NotInUse(fp)
		time.Sleep(n.o.CollectAfter - 2*n.o.EpochEvery)
		n.reset() // the name of epoch 0 is due after that of epoch 1
		kept := func() (epoch uint64, there bool, names int) {
			k := n.names.Catalog()
			e, there := k.Spaces[fp]
			return e.Epoch, there, len(k.Orphans)
		}
		one := false
		for range 24 {
			time.Sleep(n.o.CollectAfter / 4)
			synctest.Wait()
			epoch, there, names := kept()
			if names > 0 && epoch != 1 {
				t.Errorf("the epoch went back to %d while %d names of the space wait to be collected", epoch, names)
			}
			if names == 0 && there {
				t.Error("a private space is kept of which nothing is left")
			}
			one = one || names == 1
		}
		if _, _, names := kept(); names != 0 || !one {
			t.Errorf("%d names are left; one ended before the other: %v", names, one)
		}
	})
}

// TestAbandonedSpacesEndWhenTheyClose checks that nothing is kept of private spaces that are
// collected while they are open, after they are closed.
func TestAbandonedSpacesEndWhenTheyClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 200, 2, Options{}, sharing(&listing{Shelf: pooltest.NewShelf()}))
		for _, name := range []string{"a", "b", "c"} {
			s := specOf(name, 2)
			n.InUse(s.Fingerprint, pool.PrivateGeneration)
			id, err := n.OpenSpace(s)
			check(t, err)
			n.NotInUse(s.Fingerprint)
			time.Sleep(4 * n.o.CollectAfter)
			synctest.Wait()
			if !n.spaces.get(id).now.Load().off {
				t.Error("a space that was collected has tiers before its engine is back")
			}
			check(t, n.CloseSpace(id))
		}
		if got := len(n.names.Catalog().Spaces); got != 0 {
			t.Errorf("%d spaces are kept that are collected and closed", got)
		}
	})
}

// TestResetWithoutAnEpochStaysOff checks that a reset without a new epoch leaves the space without
// tiers, whatever is saved meanwhile.
func TestResetWithoutAnEpochStaysOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		local := Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave} // no marker counts
		last := catalog.New()
		last.Spaces[specOf("model", 2).Fingerprint] = catalog.Space{Epoch: catalog.MaxEpoch}
		n := newNode(t, 200, 2, Options{file: givenFile{last}}, local)
		n.save(chain("a", 5))
		n.stored(0, 5)
		if _, err := n.ResetSpace(n.space); err == nil {
			t.Error("a reset beyond the last epoch is acknowledged")
		}
		check(t, n.Forget(pool.Fingerprint{9})) // another space's, which is kept
		if now := n.spaces.get(n.space).now.Load(); !now.off {
			t.Errorf("the tiers are on again after a reset that had no epoch: %+v", now)
		}
	})
}
