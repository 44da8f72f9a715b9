package tier

import (
	"context"
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// What is about to be evicted is written before, and what is in use is not, while memory has room.
func TestOnEvict(t *testing.T) {
	d, err := dram.Open(dram.Options{Bytes: 256 << 10, SlabBytes: 64 << 10})
	check(t, err)
	defer d.Close()
	store := pooltest.NewShelf()
	p, err := Open(d, []Tier{{Name: "disk", Store: store, Local: true, Write: OnEvict}}, Options{PrefetchBytes: 128 << 10})
	check(t, err)
	defer p.Close()
	n := &node{Pool: p, t: t, spec: specOf("model", 1)}
	n.space, err = p.OpenSpace(n.spec)
	check(t, err)
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
	if _, err := Open(newNode(t, 100, 1, Options{}).mem, []Tier{{Name: "disk", Store: store, Write: OnEvict}}, Options{}); err == nil {
		t.Error("a memory that cannot tell its coldest blocks was accepted")
	}
	var _ pool.Chilling = d
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

// What is evicted faster than a tier takes it was copied before, as far as there is staging: nothing of it is lost. Behind that it is, counted, and nobody waits.
func TestOnEvictOutrunsTheTier(t *testing.T) {
	for name, c := range map[string]struct {
		staging   int64
		low, high int // blocks of 200 that come back
	}{"room for all": {16 << 20, 200, 200}, "room for 64": {1 << 20, 32, 199}} {
		t.Run(name, func(t *testing.T) {
			d, err := dram.Open(dram.Options{Bytes: 256 << 10, SlabBytes: 64 << 10})
			check(t, err)
			defer d.Close()
			staging, err := OpenStaging(c.staging)
			check(t, err)
			store := closed{pooltest.NewShelf(), make(chan struct{})}
			p, err := Open(d, []Tier{{Name: "disk", Store: store, Local: true, Write: OnEvict, PutWithin: patience}}, Options{PrefetchBytes: 128 << 10, Staging: staging})
			check(t, err)
			n := &node{Pool: p, t: t, spec: specOf("model", 1)}
			n.space, err = p.OpenSpace(n.spec)
			check(t, err)
			n.save(chain("a", 200))
			n.save(chain("b", 40))
			n.waitFor("memory is nearly full", func(*pool.TierReport) bool { return p.chill.near.Load() })
			for i := range 20 {
				n.save(chain(fmt.Sprint("new", i), 11)) // 220 blocks, one behind the other
			}
			close(store.opened)
			n.waitFor("all is written", func(r *pool.TierReport) bool { return r.Tiers[0].Putting == 0 && p.copied.Load() == 0 })
			came := 0
			for i := range 200 {
				if h := chain("a", 200).Slice(i, i+1); n.Prefix(n.space, 0, h) == 1 {
					came++
				}
			}
			r := n.Report().Tiers[0]
			t.Logf("%d of 200 are there, %d written, %d dropped", came, r.Stored, r.Dropped)
			if came < c.low || came > c.high || came < 200 && r.Dropped == 0 {
				t.Errorf("%d of 200 blocks that were evicted are found, %d dropped; want %d to %d", came, r.Dropped, c.low, c.high)
			}
			n.save(chain("more", 200)) // copies are out when it closes
			check(t, p.Close())
			if staging.out() != 0 {
				t.Errorf("%d bytes of staging are lent", staging.out())
			}
			check(t, staging.Close())
		})
	}
}
