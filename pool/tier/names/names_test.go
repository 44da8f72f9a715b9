package names

import (
	"context"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open returns names of spaces in one tier, which run until the test ends. The tests of package
// tier have their use by a pool.
func open(t *testing.T, file File, local bool) *Names {
	t.Helper()
	quiet := func(what string, err error) { t.Logf("%s: %v", what, err) }
	ignore := func(pool.Fingerprint) {}
	n, err := Open(Options{
		File: file, EpochEvery: 5 * time.Second, CollectAfter: 10 * time.Minute, CollectRate: 5000, Clock: time.Now,
		Log: quiet, Resetting: ignore, Changed: ignore, Adopted: ignore,
	}, []Tier{{
		Name: "store", Store: pooltest.NewShelf(), Local: local, Within: time.Second,
		Up: func() bool { return true }, Busy: func() bool { return false }, Deleted: func([]pool.Key) {}, Log: quiet,
	}})
	check(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
	return n
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestOrphansAreBounded checks that of too many orphans the one whose scan could begin first is
// dropped and counted.
func TestOrphansAreBounded(t *testing.T) {
	n := open(t, nil, false)
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range catalog.MaxOrphans + 5 {
		n.addOrphanLocked(pool.Fingerprint{2, byte(i), byte(i >> 8)}, catalog.Orphan{NotBefore: int64(i + 1)})
	}
	if got := len(n.mu.catalog.Orphans); got != catalog.MaxOrphans || n.mu.lost != 5 {
		t.Errorf("%d names, %d lost, want %d and 5", got, n.mu.lost, catalog.MaxOrphans)
	}
	if _, there := n.mu.catalog.Orphans[pool.Fingerprint{2}]; there {
		t.Error("the name that was due first is still there")
	}
	n.mu.catalog.Orphans = map[pool.Fingerprint]catalog.Orphan{}
}

// TestAbandonedSpacesEndWhenTheyClose checks that nothing is kept of private spaces that are
// collected while they are open, after they are closed.
func TestAbandonedSpacesEndWhenTheyClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := open(t, nil, false)
		for i := range byte(3) {
			fp := pool.Fingerprint{1, i}
			n.InUse(fp, pool.PrivateGeneration)
			n.Opened(fp)
			n.NotInUse(fp)
			time.Sleep(4 * n.o.CollectAfter)
			synctest.Wait()
			if !n.Use(fp).Off {
				t.Error("a space that was collected has tiers before its engine is back")
			}
			n.Closed(fp)
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		if got := len(n.mu.abandoned) + len(n.mu.idle) + len(n.mu.open) + len(n.mu.catalog.Spaces); got != 0 {
			t.Errorf("%d notes are left of spaces that are collected and closed", got)
		}
	})
}

// TestResetAfterOneWithoutAnEpoch checks that a reset without a new epoch leaves the space off,
// whatever is saved meanwhile, until one that has an epoch.
func TestResetAfterOneWithoutAnEpoch(t *testing.T) {
	n := open(t, catalog.File(filepath.Join(t.TempDir(), "resets")), true)
	fp := pool.Fingerprint{1}
	last := func(epoch uint64) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.mu.catalog.Spaces[fp] = catalog.Space{Epoch: epoch}
	}
	last(catalog.MaxEpoch)
	n.Opened(fp)
	if n.Reset(fp) == nil {
		t.Error("a reset beyond the last epoch is acknowledged")
	}
	check(t, n.Reset(pool.Fingerprint{9})) // another space's, which is kept
	if !n.Use(fp).Off {
		t.Error("the tiers are on again after a reset that had no epoch")
	}
	last(catalog.MaxEpoch - 1)
	check(t, n.Reset(fp))
	n.mu.Lock()
	failed := len(n.mu.failed)
	n.mu.Unlock()
	if n.Use(fp).Off || failed != 0 {
		t.Error("the tiers are off after a reset that was kept")
	}
}
