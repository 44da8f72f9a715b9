package mem_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/mem"
	"github.com/kvagent/kvagent/pool/pooltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB, o pooltest.Options) pooltest.Pool {
	p, err := mem.Open(mem.Options{Bytes: o.Bytes, Clock: o.Clock})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPool(t *testing.T) { pooltest.TestPool(t, open) }

func TestStore(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, specs ...pool.Spec) pool.Store {
		p := open(t, pooltest.Options{Bytes: 1 << 20})
		t.Cleanup(func() { p.Close() })
		return pooltest.NewStore(t, p, specs...)
	})
}
