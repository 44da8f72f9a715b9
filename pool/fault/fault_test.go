package fault

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func openMem(t testing.TB, specs ...pool.Spec) pool.Store {
	p, err := dram.Open(dram.Options{Bytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return pooltest.NewStore(t, p, specs...)
}

func wrap(t testing.TB, below pool.Store, o Options) *Store {
	t.Helper()
	s, err := New(below, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestNothingHappensAtRateZero(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, specs ...pool.Spec) pool.Store {
		return wrap(t, openMem(t, specs...), Options{})
	})
}

func TestEveryKind(t *testing.T) {
	pooltest.TestFaultyStore(t, func(t testing.TB, specs ...pool.Spec) pool.Store {
		return wrap(t, openMem(t, specs...), Every(7, 0.04))
	})
}
