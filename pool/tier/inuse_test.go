package tier

import (
	"context"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// lingering is a store whose calls end at their deadline and use the data until it is told to let
// go.
type lingering struct {
	pool.Store
	letGo chan struct{}
}

func (l lingering) late(ctx context.Context) error {
	<-ctx.Done()
	return &pool.InUse{Done: l.letGo, Err: ctx.Err()}
}

func (l lingering) Put(ctx context.Context, _ []pool.Item) error { return l.late(ctx) }
func (l lingering) Get(ctx context.Context, _ []pool.Item) error { return l.late(ctx) }

// TestStillInUse checks that data that a store still uses is not lent again until the store lets
// go, and that a pool that closes does not wait for it.
func TestStillInUse(t *testing.T) {
	h := chain("a", 10)
	store := pooltest.NewShelf()
	writer := newNode(t, 200, 2, Options{}, Tier{Name: "shared", Store: store, Write: OnSave})
	writer.save(h)
	writer.stored(0, 10)
	slow := lingering{store, make(chan struct{})}
	tr := Tier{Name: "shared", Store: slow, Write: OnSave, FetchWithin: 10 * time.Millisecond,
		PutWithin: 10 * time.Millisecond, BreakAfter: 1000}
	n := newNode(t, 200, 2, Options{}, tr)
	n.know(h)
	_, refs := n.settled(h)
	if got := n.load(h); got != 0 {
		t.Errorf("%d blocks came", got)
	}
	n.Unpin(refs)
	fetched := n.o.Staging.Lent()
	if want := 10 * n.spaces.get(n.space).groups[0].staged; fetched != want {
		t.Errorf("%d bytes of staging are lent, want the %d that are in use", fetched, want)
	}
	n.save(chain("b", 5))
	n.waitFor("writes are late", func(r *pool.TierReport) bool { return r.Tiers[0].Lost == 5 })
	if got := n.o.Staging.Lent(); got <= fetched {
		t.Errorf("%d bytes of staging are lent, with those of writes", got)
	}
	close(slow.letGo)
	n.waitFor("it has let go", func(*pool.TierReport) bool { return n.o.Staging.Lent() == 0 })

	closing := newNode(t, 200, 2, Options{},
		Tier{Name: "shared", Store: lingering{store, make(chan struct{})}, FetchWithin: 10 * time.Millisecond})
	closing.know(h)
	_, refs = closing.settled(h)
	closing.Unpin(refs)
	check(t, closing.Pool.Close()) // and nothing of staging is lent, which its end holds
}
