package fault

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func wrap(t testing.TB, below pool.Store, o Options) *Store {
	t.Helper()
	s, err := New(below, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestNothingHappensAtRateZero(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		return wrap(t, pooltest.NewShelf(), Options{})
	})
}

func TestEveryKind(t *testing.T) {
	pooltest.TestFaultyStore(t, func(t testing.TB, _ ...pool.Spec) pool.Store {
		return wrap(t, pooltest.NewShelf(), Every(7, 0.04))
	})
}
