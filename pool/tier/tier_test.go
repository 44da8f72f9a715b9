package tier

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// whole is a pool as the suite of pools needs it.
type whole struct {
	*Pool
	memory *dram.Pool
}

func (w whole) Close() error {
	if err := w.Pool.Close(); err != nil {
		return err
	}
	return w.memory.Close()
}

// TestPool runs the suite of pools, over tiers that have nothing of it, and over one that is down.
func TestPool(t *testing.T) {
	gone := func() pool.Store {
		s, err := fault.New(pooltest.NewShelf(), fault.Options{Seed: 1, Rates: map[fault.Kind]float64{fault.Error: 1}})
		check(t, err)
		return s
	}
	for name, tiers := range map[string]func() []Tier{
		"no tiers": func() []Tier { return nil },
		"empty": func() []Tier {
			return []Tier{{Name: "local", Store: pooltest.NewShelf(), Local: true},
				{Name: "shared", Store: pooltest.NewShelf()}}
		},
		"gone": func() []Tier {
			return []Tier{{Name: "disk", Store: gone(), Local: true, Write: OnSecondUse},
				{Name: "shared", Store: gone(), Write: OnSave}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			pooltest.TestPool(t, func(t testing.TB, o pooltest.Options) pooltest.Pool {
				m, err := dram.Open(dram.Options{Bytes: o.Bytes, SlabBytes: o.SlabBytes, Clock: o.Clock})
				check(t, err)
				p, err := Open(m, tiers(), Options{PrefetchBytes: 64 << 10})
				check(t, err)
				return whole{p, m}
			})
		})
	}
}

// TestComesBack checks that evicted blocks come back from a shared tier, byte for byte, with all
// shards, and are pinned until their refs are released.
func TestComesBack(t *testing.T) {
	for _, shards := range []int{1, 3} {
		store := pooltest.NewShelf()
		n := newNode(t, 400, shards, Options{}, Tier{Name: "shared", Store: store, Write: OnSave})
		h := chain("a", 40)
		n.save(h)
		n.stored(0, 40)
		n.flush()
		if got := n.mem.Prefix(n.space, 0, h); got != 0 {
			t.Fatalf("%d blocks are still in memory", got)
		}
		if got := n.Prefix(n.space, 0, h); got != 0 {
			t.Fatalf("%d blocks are stored before anybody asked the tier", got)
		}
		if got := n.know(h); got != 40 {
			t.Fatalf("%d blocks are known, want 40", got)
		}
		count, refs := n.settled(h)
		if count != 40 || len(refs) != 40 {
			t.Fatalf("%d blocks pinned, %d refs, want 40", count, len(refs))
		}
		if got := n.load(h); got != 40 {
			t.Fatalf("%d blocks came, want 40", got)
		}
		if got := n.mem.Stats().PinnedEntries; got != 40 {
			t.Errorf("%d entries pinned, want 40", got)
		}
		n.flush()
		if got := n.load(h); got != 40 {
			t.Errorf("what a settled promise holds was evicted: %d of 40 left", got)
		}
		n.Unpin(refs)
		if got := n.mem.Stats().Pinned; got != 0 {
			t.Errorf("%d bytes stay pinned", got)
		}
	}
}

// TestLocalIsExact checks that the look-up asks a local tier directly.
func TestLocalIsExact(t *testing.T) {
	n := newNode(t, 400, 2, Options{}, Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: OnSave})
	h := chain("a", 100)
	n.save(h.Slice(0, 90))
	n.stored(0, 90)
	n.flush()
	if got := n.Prefix(n.space, 0, h); got != 90 {
		t.Fatalf("prefix %d, want 90", got)
	}
	present := make([]bool, 100)
	n.Exists(n.space, 0, h, present)
	for i, there := range present {
		if there != (i < 90) {
			t.Fatalf("block %d: present %v", i, there)
		}
	}
	if n.ask(h, 0) {
		t.Error("pending, with no shared tier")
	}
	count, refs := n.settled(h)
	if count != 90 || n.load(h.Slice(0, 90)) != 90 {
		t.Errorf("%d pinned, want 90", count)
	}
	n.Unpin(refs)
}

// TestPieces checks that a chain spread over memory and two tiers is found as one.
func TestPieces(t *testing.T) {
	near, far := pooltest.NewShelf(), pooltest.NewShelf()
	writer := newNode(t, 400, 1, Options{}, Tier{Name: "far", Store: far, Write: OnSave})
	h := chain("a", 60)
	writer.save(h)
	writer.stored(0, 60)
	disk := newNode(t, 400, 1, Options{}, Tier{Name: "near", Store: near, Write: OnSave})
	disk.save(h.Slice(20, 40))
	disk.stored(0, 20)

	n := newNode(t, 400, 1, Options{}, Tier{Name: "near", Store: near, Local: true, Write: Never},
		Tier{Name: "far", Store: far})
	n.save(h.Slice(0, 10))
	n.save(h.Slice(45, 50))
	if got := n.know(h); got != 60 {
		t.Fatalf("prefix %d, want 60", got)
	}
	count, refs := n.settled(h)
	if count != 60 || n.load(h) != 60 {
		t.Errorf("%d of 60 pinned", count)
	}
	r := n.Report()
	if r.Tiers[0].Hits != 20 || r.Tiers[1].Hits != 25 {
		t.Errorf("%d blocks from near, %d from far; want 20 and 25", r.Tiers[0].Hits, r.Tiers[1].Hits)
	}
	n.Unpin(refs)
}
