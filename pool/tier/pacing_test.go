package tier

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// gatekeeper lets writers go on when the test says so.
type gatekeeper struct {
	arrived chan int64    // bytes of one that waits
	letGo   chan struct{} // one for each
	copies  atomic.Int32  // that have ended
}

func newGatekeeper() *gatekeeper {
	return &gatekeeper{arrived: make(chan int64, 64), letGo: make(chan struct{}, 64)}
}

func (g *gatekeeper) pace(ctx context.Context, bytes int64) func() {
	g.arrived <- bytes
	select {
	case <-g.letGo:
	case <-ctx.Done():
	}
	return func() { g.copies.Add(1) }
}

func (g *gatekeeper) await(t *testing.T) int64 {
	t.Helper()
	select {
	case bytes := <-g.arrived:
		return bytes
	case <-time.After(patience):
		t.Fatal("no writer waits")
		return 0
	}
}

// TestWritersWaitForTheirPace expects a writer to wait before it copies blocks out of memory,
// without staging, while fetches go on; and to write them afterwards.
func TestWritersWaitForTheirPace(t *testing.T) {
	store, gate := pooltest.NewShelf(), newGatekeeper()
	n := newNode(t, 400, 1, Options{Pace: gate.pace}, Tier{Name: "shared", Store: store, Write: OnSave, Workers: 2})
	first, second := chain("a", 8), chain("b", 8)
	n.save(first)
	if bytes := gate.await(t); bytes < shardBytes {
		t.Errorf("%d bytes are to be copied", bytes)
	}
	if stored, lent := n.Report().Tiers[0].Stored, n.o.Staging.Lent(); stored != 0 || lent != 0 {
		t.Errorf("%d blocks written, %d bytes of staging lent, while the writer waits", stored, lent)
	}
	gate.letGo <- struct{}{}
	n.waitFor("written to the tier", func(r *pool.TierReport) bool {
		for len(gate.arrived) > 0 {
			<-gate.arrived
			gate.letGo <- struct{}{}
		}
		return r.Tiers[0].Stored >= 8
	})
	if gate.copies.Load() == 0 {
		t.Error("no copy has ended")
	}
	n.save(second)
	gate.await(t)
	n.flush()
	if got := n.know(first); got != 8 {
		t.Fatalf("%d blocks are known, want 8", got)
	}
	count, refs := n.settled(first)
	if count != 8 || n.load(first) != 8 {
		t.Errorf("%d blocks fetched while a writer waits, want 8", count)
	}
	n.Unpin(refs)
	check(t, n.Close()) // while it waits
}

// TestTheOnlyWorkerDoesNotWait expects a tier with one worker, which also fetches, not to be paced.
func TestTheOnlyWorkerDoesNotWait(t *testing.T) {
	store, gate := pooltest.NewShelf(), newGatekeeper()
	n := newNode(t, 400, 1, Options{Pace: gate.pace}, Tier{Name: "shared", Store: store, Write: OnSave, Workers: 1})
	n.save(chain("a", 8))
	n.waitFor("a write, or a wait", func(r *pool.TierReport) bool {
		return r.Tiers[0].Stored >= 8 || len(gate.arrived) > 0
	})
	if len(gate.arrived) > 0 {
		t.Error("the only worker waited")
	}
}
