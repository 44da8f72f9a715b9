package tier

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// A look-up that names a transfer waits for a shared store that has failed a moment ago, as one
// does on a busy machine, and no longer for one that stays away.
func TestSharedStoreIsGivenTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &moody{Store: pooltest.NewShelf()}
		n := newNode(t, 64, 1, Options{}, Tier{Name: "shared", Store: m})
		shared := func(what string, want bool) {
			t.Helper()
			if got := n.Shared(); got != want {
				t.Errorf("%s: a shared tier to wait for: %v, want %v", what, got, want)
			}
		}
		shared("at the start", true)
		breaks(n, m)
		if n.levels[0].up() {
			t.Fatal("the breaker is closed")
		}
		shared("when the breaker has opened", true)
		time.Sleep(3400 * time.Millisecond)
		shared("before the third try", true)
		time.Sleep(200 * time.Millisecond)
		shared("after the third try", false)
		mends(n, m)
		shared("when it works again", true)
		n.levels[0].countResult(t.Context(), moves, nil)
		breaks(n, m)
		shared("when it has failed again", true)
	})
}

// far is a store whose answers take a while.
type far struct {
	pool.Store
	while func() <-chan time.Time
}

func (f far) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	select {
	case <-f.while():
		return f.Store.Exists(ctx, keys, status)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A store whose answers take longer than a request waits is used.
func TestFarStoreIsUsed(t *testing.T) {
	h := chain("a", 100)
	store := shelved(t, h)
	synctest.Test(t, func(t *testing.T) {
		while := func() <-chan time.Time { return time.After(300 * time.Millisecond) }
		n := newNode(t, 400, 2, Options{}, Tier{Name: "shared", Store: far{store, while}})
		if found := n.know(h); found != h.N {
			t.Errorf("%d of %d blocks are found", found, h.N)
		}
		if s := n.Report().Tiers[0]; s.AskFailed != 0 || !s.Up {
			t.Errorf("%d questions failed, the store is %s", s.AskFailed, s.State)
		}
	})
}

// A local tier is none that another node writes to.
func TestLocalTierIsNotShared(t *testing.T) {
	n := newNode(t, 64, 1, Options{}, Tier{Name: "disk", Store: pooltest.NewShelf(), Local: true})
	if n.Shared() {
		t.Error("a disk is waited for")
	}
}
