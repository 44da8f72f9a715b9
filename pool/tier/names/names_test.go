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

// TestLastEpoch checks that the tiers are off for a space whose epochs are used up, whatever is
// saved, also after a further reset.
func TestLastEpoch(t *testing.T) {
	n := open(t, catalog.File(filepath.Join(t.TempDir(), "resets")), true)
	fp := pool.Fingerprint{1}
	n.mu.Lock()
	n.mu.catalog.Spaces[fp] = catalog.Space{Epoch: catalog.MaxEpoch - 1}
	n.mu.Unlock()
	if n.Opened(fp).Off {
		t.Error("the tiers are off before the last epoch")
	}
	for range 2 {
		check(t, n.Reset(fp))
		n.Forgotten(fp, n.Epoch(fp))           // memory was reset
		check(t, n.Reset(pool.Fingerprint{9})) // another space's, which is kept
		if !n.Use(fp).Off {
			t.Error("the tiers are on in the last epoch")
		}
	}
}
