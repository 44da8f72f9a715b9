package tier

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// evicting returns a node with a tier that is written to on eviction.
func evicting(t *testing.T, bytes int64) (*node, *dram.Pool, *pooltest.Shelf) {
	t.Helper()
	d, err := dram.Open(dram.Options{Bytes: bytes, SlabBytes: 64 << 10})
	check(t, err)
	t.Cleanup(func() { check(t, d.Close()) })
	store := pooltest.NewShelf()
	p, err := Open(d, []Tier{{Name: "disk", Store: store, Local: true, Write: OnEvict}},
		Options{PrefetchBytes: 128 << 10})
	check(t, err)
	t.Cleanup(func() { check(t, p.Close()) })
	n := &node{Pool: p, t: t, spec: specOf("model", 1)}
	n.space, err = p.OpenSpace(n.spec)
	check(t, err)
	return n, d, store
}

// TestOnEvict checks that blocks about to be evicted are written first, and nothing while memory
// has room.
func TestOnEvict(t *testing.T) {
	n, _, store := evicting(t, 256<<10)
	n.save(chain("a", 100))
	n.save(chain("b", 100))
	if store.Len() != 0 {
		t.Errorf("%d blocks are written while memory has room", store.Len())
	}
	n.save(chain("c", 40)) // 240 of 256
	n.stored(0, 240)
	for i := range 10 {
		n.save(chain(fmt.Sprint("new", i), 20))
	}
	count, refs := n.settled(chain("a", 100))
	if count != 100 || n.load(chain("a", 100)) != 100 {
		t.Errorf("%d of 100 blocks came back: %+v", count, n.Report())
	}
	n.Unpin(refs)
}

// closed is a store that takes nothing until it is opened.
type closed struct {
	pool.Store
	opened chan struct{}
}

func (c closed) Put(ctx context.Context, items []pool.Item) error {
	select {
	case <-c.opened:
		return c.Store.Put(ctx, items)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TestOnEvictOutrunsTheTier checks that blocks evicted faster than the tier takes them were copied
// before, and none is lost while staging has room. After that blocks are lost and counted, and no
// save waits.
func TestOnEvictOutrunsTheTier(t *testing.T) {
	for name, c := range map[string]struct {
		staging   int64
		low, high int // blocks of 200 that come back
	}{"room for all": {16 << 20, 200, 200}, "room for 64": {1 << 20, 64, 199}} {
		t.Run(name, func(t *testing.T) {
			d, err := dram.Open(dram.Options{Bytes: 256 << 10, SlabBytes: 64 << 10})
			check(t, err)
			defer d.Close()
			staging, err := transit.OpenStaging(c.staging)
			check(t, err)
			store := closed{pooltest.NewShelf(), make(chan struct{})}
			p, err := Open(d, []Tier{{Name: "disk", Store: store, Local: true, Write: OnEvict, PutWithin: patience}},
				Options{PrefetchBytes: 128 << 10, Staging: staging})
			check(t, err)
			n := &node{Pool: p, t: t, spec: specOf("model", 1)}
			n.space, err = p.OpenSpace(n.spec)
			check(t, err)
			// A chain of its own each: in one, a block that is to be evicted while the next one
			// is being copied would keep all before it.
			for i := range 200 {
				n.save(chain(fmt.Sprint("a", i), 1))
			}
			n.save(chain("b", 40))
			n.waitFor("memory is nearly full", func(*pool.TierReport) bool { return p.onEvict.near.Load() })
			for i := range 20 {
				n.save(chain(fmt.Sprint("new", i), 11)) // 220 blocks, consecutive
			}
			close(store.opened)
			n.waitFor("all is written", func(r *pool.TierReport) bool {
				return r.Tiers[0].Putting == 0 &&
					p.levels[0].copied.Load() == 0
			})
			arrived := 0
			for i := range 200 {
				arrived += n.Prefix(n.space, 0, chain(fmt.Sprint("a", i), 1))
			}
			r := n.Report().Tiers[0]
			t.Logf("%d of 200 are there, %d written, %d dropped", arrived, r.Stored, r.Dropped)
			if arrived < c.low || arrived > c.high || arrived < 200 && r.Dropped == 0 {
				t.Errorf("%d of 200 blocks that were evicted are found, %d dropped; want %d to %d", arrived, r.Dropped,
					c.low, c.high)
			}
			n.save(chain("more", 200)) // copies are out when it closes
			check(t, p.Close())
			if staging.Lent() != 0 {
				t.Errorf("%d bytes of staging are lent", staging.Lent())
			}
			check(t, staging.Close())
		})
	}
}

// reading is a memory that counts the blocks that are read to be written elsewhere.
type reading struct {
	*dram.Pool
	read atomic.Int64
}

func (r *reading) ReadWithoutTouch(b *pool.Batch, read func(s pool.Slot) pool.Status) {
	r.read.Add(1)
	r.Pool.ReadWithoutTouch(b, read)
}

// coldNode is a stack that writes on eviction over a memory of 256 blocks, nearly full.
func coldNode(t *testing.T, staging int64, tiers ...Tier) (*node, *reading) {
	t.Helper()
	d, err := dram.Open(dram.Options{Bytes: 256 << 10, SlabBytes: 64 << 10})
	check(t, err)
	s, err := transit.OpenStaging(staging)
	check(t, err)
	m := &reading{Pool: d}
	p, err := Open(m, tiers, Options{PrefetchBytes: 128 << 10, Staging: s,
		Log: func(tier, what string, err error) { t.Logf("tier %q: %s: %v", tier, what, err) }})
	check(t, err)
	n := &node{Pool: p, t: t, spec: specOf("model", 1)}
	n.space, err = p.OpenSpace(n.spec)
	check(t, err)
	t.Cleanup(func() {
		check(t, p.Close())
		if s.Lent() != 0 {
			t.Errorf("%d bytes of staging are lent", s.Lent())
		}
		check(t, errors.Join(s.Close(), d.Close()))
	})
	n.save(chain("first", 240))
	n.waitFor("memory is nearly full", func(*pool.TierReport) bool { return p.onEvict.near.Load() })
	return n, m
}

// TestOnEvictBesideATierThatIsDown checks that a tier that is down costs saves nothing, since
// nothing is copied for it, alone or next to one that works.
func TestOnEvictBesideATierThatIsDown(t *testing.T) {
	f, err := fault.New(pooltest.NewShelf(), fault.Options{Seed: 1, Rates: map[fault.Kind]float64{fault.Error: 1}})
	check(t, err)
	down := Tier{Name: "down", Store: f, Local: true, Write: OnEvict, BreakAfter: 1, BreakFirst: time.Minute,
		BreakLast: time.Minute}
	works := Tier{Name: "works", Store: pooltest.NewShelf(), Local: true, Write: OnEvict}
	for name, tiers := range map[string][]Tier{"alone": {down}, "beside another": {down, works}} {
		t.Run(name, func(t *testing.T) {
			n, m := coldNode(t, 16<<20, tiers...)
			n.waitFor("the tier is down", func(r *pool.TierReport) bool { return r.Tiers[0].State == "open" })
			n.onEvict.mu.Lock() // a look that had begun has ended
			read, copied, waiting := m.read.Load(), n.levels[0].copied.Load(), n.Report().Tiers[0].Putting
			n.onEvict.mu.Unlock()
			for i := range 50 {
				n.save(chain(fmt.Sprint("new", i), 10))
			}
			if more := m.read.Load() - read; len(tiers) == 1 && more != 0 {
				t.Errorf("%d blocks were read for a tier that is down", more)
			}
			if now := n.Report().Tiers[0].Putting; now > waiting || n.levels[0].copied.Load() > copied {
				t.Errorf("%d blocks wait for a tier that is down, %d before; %d bytes of copies, %d before", now,
					waiting, n.levels[0].copied.Load(), copied)
			}
			if len(tiers) == 2 {
				n.stored(1, 500) // for the other one they are
			}
		})
	}
}

// TestOnEvictBesideATierThatHangs checks that a tier that takes nothing fills its own share of
// staging and no other.
func TestOnEvictBesideATierThatHangs(t *testing.T) {
	stays, opens := closed{pooltest.NewShelf(), make(chan struct{})}, closed{pooltest.NewShelf(), make(chan struct{})}
	tier := func(name string, s pool.Store) Tier {
		return Tier{Name: name, Store: s, Local: true, Write: OnEvict, PutWithin: patience, BatchItems: 1}
	}
	n, _ := coldNode(t, 1<<20, tier("hangs", stays), tier("works", opens))
	share := int64(1<<20) / coldCopies / 2
	full := func(l *level) bool { return l.copied.Load() > share-transit.Unit && l.copied.Load() <= share }
	n.waitFor("both have their share", func(*pool.TierReport) bool { return full(n.levels[0]) && full(n.levels[1]) })
	close(opens.opened)
	n.waitFor("one has written", func(r *pool.TierReport) bool {
		return r.Tiers[1].Putting == 0 &&
			n.levels[1].copied.Load() == 0
	})
	if !full(n.levels[0]) {
		t.Errorf("the tier that hangs has %d bytes of copies, its share is %d", n.levels[0].copied.Load(), share)
	}
	n.save(chain("more", 10))
	n.waitFor("what came later is written too", func(r *pool.TierReport) bool { return r.Tiers[1].Stored >= 250 })
}

// TestOnEvictKeepsTheOrder checks that writing does not count as a use of a block: however often
// blocks are examined, only the coldest are written.
func TestOnEvictKeepsTheOrder(t *testing.T) {
	n, d, store := evicting(t, 1<<20)
	n.save(chain("a", 1000))
	before, after := make([]pool.Cold, coldMany), make([]pool.Cold, coldMany)
	d.Coldest(before)
	n.waitFor("memory is nearly full", func(*pool.TierReport) bool { return n.onEvict.near.Load() })
	for range 10 {
		n.offerColdest()
		n.waitFor("what was offered is written",
			func(r *pool.TierReport) bool { return r.Tiers[0].Putting == 0 && n.levels[0].copied.Load() == 0 })
	}
	if d.Coldest(after); !slices.Equal(before, after) {
		t.Error("blocks go in another order when they were written")
	}
	if store.Len() != coldMany {
		t.Errorf("%d blocks are written, want the %d that go next", store.Len(), coldMany)
	}
}
