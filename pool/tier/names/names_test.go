package names

import (
	"context"
	"path/filepath"
	"testing"
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
		File: file, EpochEvery: 5 * time.Second, Clock: time.Now, Log: quiet, Resetting: ignore, Changed: ignore,
		Adopted: ignore,
	}, []Tier{{
		Name: "store", Store: pooltest.NewShelf(), Local: local, Within: time.Second,
		Up: func() bool { return true }, Log: quiet,
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
	n.Forgotten(fp, n.Epoch(fp)) // memory was reset
	n.mu.Lock()
	failed := len(n.mu.failed)
	n.mu.Unlock()
	if n.Use(fp).Off || failed != 0 {
		t.Error("the tiers are off after a reset that was kept")
	}
}
