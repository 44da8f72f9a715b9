package tier

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// called is a store that counts its calls, except those for markers of other spaces' resets.
type called struct {
	pool.Store
	calls atomic.Int64
}

func (c *called) note(keys ...pool.Key) {
	for i := range keys {
		if keys[i].Space != pool.EpochMarkers {
			c.calls.Add(1)
		}
	}
}

func (c *called) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	c.note(keys...)
	return c.Store.Exists(ctx, keys, status)
}

func (c *called) Put(ctx context.Context, items []pool.Item) error {
	for i := range items {
		c.note(items[i].Key)
	}
	return c.Store.Put(ctx, items)
}

func (c *called) Get(ctx context.Context, items []pool.Item) error {
	for i := range items {
		c.note(items[i].Key)
	}
	return c.Store.Get(ctx, items)
}

func (c *called) Delete(ctx context.Context, keys []pool.Key) error {
	c.note(keys...)
	return c.Store.Delete(ctx, keys)
}

// TestPrivateSpaceStaysInMemory checks that no block of a private space is written to a tier,
// whatever the tier writes, that no tier is asked for one, and that a reset of it tells no tier.
// Look-ups find what memory has, before the reset alone.
func TestPrivateSpaceStaysInMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var tiers []Tier
		var stores []*called
		for _, write := range []When{OnSave, OnSecondUse} {
			for _, where := range []string{"local", "shared"} {
				c := &called{Store: pooltest.NewShelf()}
				stores = append(stores, c)
				tiers = append(tiers, Tier{
					Name: write.String() + "-" + where, Store: c, Local: where == "local", Write: write,
				})
			}
		}
		m := openMemory(t, 200)
		n := openNode(t, m, m, 2, Options{PrefetchBytes: 64 << 10}, tiers)
		public := n.spec
		n.spec = specOf("private", 2)
		n.spec.Private = true
		var err error
		n.space, err = n.OpenSpace(n.spec)
		check(t, err)
		h := chain("a", 95) // memory is nearly full
		use := func(want int) {
			t.Helper()
			if n.ask(chain("b", 10), time.Second) || n.Prefix(n.space, 0, chain("b", 10)) != 0 {
				t.Error("a block that memory lacks is pending or found")
			}
			for range 2 {
				if got := n.know(h); got != want {
					t.Errorf("%d blocks are found, want %d", got, want)
				}
			}
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		n.save(h)
		use(h.N)
		n.reset()
		use(0)
		n.save(h)
		use(h.N)
		if n.load(h) != h.N {
			t.Error("blocks of after the reset are not in memory")
		}
		for i, s := range stores {
			if got := s.calls.Load(); got != 0 {
				t.Errorf("tier %s had %d calls for keys of a private space", tiers[i].Name, got)
			}
			if got := s.Usage(); got.Items != 0 {
				t.Errorf("tier %s has %d values", tiers[i].Name, got.Items)
			}
		}
		check(t, n.CloseSpace(n.space))
		n.spec = public
		n.space, _ = n.openID(public.Fingerprint)
		n.save(chain("p", 2)) // as a proof that the tiers work
		n.stored(0, 2)
	})
}
