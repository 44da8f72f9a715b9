package tier

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// fillKept fills what is kept of spaces with such as were used later than any other.
func (n *node) fillKept() {
	n.spaces.mu.Lock()
	defer n.spaces.mu.Unlock()
	for i := 0; len(n.spaces.kept.spaces) < maxKept; i++ {
		fp := pool.Fingerprint{0xee, byte(i), byte(i >> 8), byte(i >> 16)}
		n.spaces.kept.spaces[fp] = epochOf{used: n.now().Unix() + 1<<20}
	}
}

// A shared store that lost the marker of a reset is told again by a node that has the space closed,
// as long as names of earlier epochs wait to be collected: a node that is new hears of the epoch, and
// what it stores is not deleted.
func TestClosedSpaceIsFollowedUntilItIsCollected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &listing{Shelf: pooltest.NewShelf()}
		a := newNode(t, 200, 2, Options{Node: "a"}, sharing(store))
		a.reset()
		time.Sleep(2 * a.o.EpochEvery)
		synctest.Wait()
		check(t, a.CloseSpace(a.space))
		check(t, store.Delete(t.Context(), []pool.Key{markerKey(a.spec.Fingerprint, 1)}))
		b := newNode(t, 200, 2, Options{Node: "b"}, sharing(store))
		time.Sleep(2 * followFull * a.o.EpochEvery)
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

// A space that makes room in what one node keeps is still in use on another: what that one stores in
// a shared tier stays, with the markers of its epoch.
func TestSpaceThatMadeRoomIsUsedByOthers(t *testing.T) {
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
		name := storedName(b.spec.Fingerprint, 1)
		before := store.count(name)
		if before == 0 || local.count(name) == 0 || a.Report().Names != 0 {
			t.Fatalf("%d and %d values, %+v", before, local.count(name), a.Report())
		}
		a.fillKept()
		a.InUse(pool.Fingerprint{1, 2, 3}, true)
		time.Sleep(4 * a.o.CollectAfter)
		synctest.Wait()
		if got := store.count(name); got != before || len(b.markers(store, 1)) != 1 {
			t.Errorf("%d of %d values that another node uses are left, and the markers of %v", got, before, b.markers(store, 1))
		}
		if got := local.count(name); got != 0 || a.Report().Names != 0 {
			t.Errorf("%d values of the space that made room are left in the local tier; %+v", got, a.Report())
		}
	})
}
