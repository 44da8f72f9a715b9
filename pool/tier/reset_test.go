package tier

import (
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// plain reports whether a store has an entry under the name that other nodes use.
func (n *node) plain(store *pooltest.Shelf, h pool.Hashes, i int) bool {
	n.t.Helper()
	status := make([]pool.Status, 1)
	check(n.t, store.Exists(n.t.Context(), []pool.Key{n.key(n.batch(h, 0), i)}, status))
	return status[0] == pool.OK
}

// blocksIn returns the values in a store that are not markers of the node's space, after the marker
// of the node's epoch is there.
func (n *node) blocksIn(store *pooltest.Shelf) int {
	n.t.Helper()
	n.waitFor("the marker is put", func(*pool.TierReport) bool { return n.marked(store) })
	keys := make([]pool.Key, 64)
	for i := range keys {
		keys[i] = catalog.MarkerKey(n.spec.Fingerprint, uint64(i+1))
	}
	status := make([]pool.Status, len(keys))
	check(n.t, store.Exists(n.t.Context(), keys, status))
	blocks := store.Len()
	for _, s := range status {
		if s == pool.OK {
			blocks--
		}
	}
	return blocks
}

// TestResetBeforePut checks that entries waiting to be written when the space is reset are not
// written under the old name. Memory may have the block again, with new weights, and other nodes
// read that name.
func TestResetBeforePut(t *testing.T) {
	store := pooltest.NewShelf()
	f, err := fault.New(store, fault.Options{Seed: 1, Rates: map[fault.Kind]float64{fault.Hang: 1}})
	check(t, err)
	n := newNode(t, 200, 1, Options{}, Tier{Name: "shared", Store: f, Write: OnSave, Workers: 1, BatchItems: 1,
		BreakAfter: 1000})
	first, h := chain("first", 1), chain("a", 1)
	n.save(first)
	n.waitFor("the worker hangs", func(r *pool.TierReport) bool { return r.Tiers[0].Putting == 0 })
	n.save(h)
	if _, err := n.ResetSpace(n.space); err != nil {
		t.Fatal(err)
	}
	n.save(h) // with new weights
	f.Switch(false)
	n.stored(0, 1)
	n.waitFor("the queue is empty", func(r *pool.TierReport) bool {
		return r.Tiers[0].Putting == 0 && r.Tiers[0].Stored+r.Tiers[0].Dropped >= 3
	})
	if n.plain(store, h, 0) || n.plain(store, first, 0) {
		t.Error("a block was written under the old name after the reset")
	}
	if got := n.blocksIn(store); got != 1 {
		t.Errorf("%d blocks are written, want the one of after the reset", got)
	}
}

// resettingMemory is a memory in which something happens right before the first read for a tier.
type resettingMemory struct {
	*dram.Pool
	once sync.Once
	turn func()
}

func (m *resettingMemory) Acquire(b *pool.Batch) {
	m.once.Do(m.turn)
	m.Pool.Acquire(b)
}

// TestResetDuringPut is TestResetBeforePut with the reset between the check of the epoch and the
// copy.
func TestResetDuringPut(t *testing.T) {
	store := pooltest.NewShelf()
	m := openMemory(t, 200)
	over := &resettingMemory{Pool: m}
	n := openNode(t, m, over, 1, Options{PrefetchBytes: 64 << 10},
		[]Tier{{Name: "shared", Store: store, Write: OnSave}})
	h := chain("a", 1)
	over.turn = func() {
		if _, err := n.ResetSpace(n.space); err != nil {
			t.Error(err)
		}
		n.save(h)
	}
	n.save(h)
	n.waitFor("both are done with", func(r *pool.TierReport) bool { return r.Tiers[0].Stored+r.Tiers[0].Dropped >= 2 })
	if n.plain(store, h, 0) {
		t.Error("a block with new weights was written under the old name")
	}
}

// TestForgetBeforeOpen checks that a space that is reset before this process opened it does not
// find what the tiers have from an earlier process.
func TestForgetBeforeOpen(t *testing.T) {
	store := pooltest.NewShelf()
	writer := newNode(t, 64, 1, Options{}, Tier{Name: "shared", Store: store, Write: OnSave})
	h := chain("a", 5)
	writer.save(h)
	writer.stored(0, 5)
	m := openMemory(t, 100)
	defer m.Close()
	p, err := Open(m, []Tier{{Name: "shared", Store: store}}, Options{PrefetchBytes: 64 << 10})
	check(t, err)
	defer p.Close()
	check(t, p.Forget(writer.spec.Fingerprint))
	n := &node{Pool: p, t: t, mem: m, spec: writer.spec}
	n.space, err = p.OpenSpace(n.spec)
	check(t, err)
	if got := n.know(h); got != 0 {
		t.Errorf("%d blocks of before the reset are found", got)
	}
}

// TestCloseSpaceUnderWay closes a space while its blocks are fetched and written. Queued ones end,
// running ones are not installed, and nothing is left. The tier keeps its values until the space is
// opened again.
func TestCloseSpaceUnderWay(t *testing.T) {
	h := chain("a", 40)
	n, f, _ := filled(t, h, map[fault.Kind]float64{fault.Hang: 1},
		Tier{Workers: 1, BatchItems: 2, FetchWithin: time.Minute, PutWithin: time.Minute, BreakAfter: 1000,
			Write: OnSave}, Options{})
	n.know(h)
	f.Switch(true)
	_, refs, _ := n.Pin(n.space, 0, h, 1<<40, nil)
	n.waitFor("one is under way", func(r *pool.TierReport) bool { return r.Tiers[0].Fetching == 39 })
	n.save(chain("b", 10))
	check(t, n.CloseSpace(n.space))
	if got, _, _ := n.Pin(n.space, 0, h, 1<<40, nil); got != 0 {
		t.Errorf("%d blocks of a space that is closed", got)
	}
	f.Switch(false)
	n.settle(refs)
	n.Unpin(refs)
	n.mem.Sweep()
	if u := n.mem.Stats().Entries; u != 0 {
		t.Errorf("%d blocks of a closed space in memory", u)
	}
	n.waitFor("nothing waits", func(r *pool.TierReport) bool { return r.Tiers[0].Putting == 0 && r.Promises == 0 })
	var err error
	n.space, err = n.OpenSpace(n.spec)
	check(t, err)
	if got := n.know(h); got != 40 {
		t.Errorf("%d blocks of the space that is open again, want 40", got)
	}
	_, refs = n.settled(h)
	if got := n.load(h); got != 40 {
		t.Errorf("%d blocks came, want 40", got)
	}
	n.Unpin(refs)
}
