package disk

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
)

func TestMain(m *testing.M) {
	if stormChild() {
		return
	}
	goleak.VerifyTestMain(m)
}

// small is a store of 16 segments of 256 KiB in a fresh directory.
func small(t testing.TB) Options {
	return Options{
		Dirs: []Dir{{t.TempDir(), 4 << 20}}, SegmentBytes: 256 << 10, WriteBytes: 64 << 10, ReadDepth: 4,
		probeEvery: 5 * time.Millisecond,
	}
}

func open(t testing.TB, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return s
}

func TestStore(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store { return open(t, small(t)) })
}

func TestStoreOnThreeDirectories(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		o := small(t)
		o.Dirs = append(o.Dirs, Dir{t.TempDir(), 4 << 20}, Dir{t.TempDir(), 8 << 20})
		return open(t, o)
	})
}

func TestStoreBehindFaults(t *testing.T) {
	pooltest.TestFaultyStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		s, err := fault.New(open(t, small(t)), fault.Every(1, 0.03))
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}
