package dram_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
	"github.com/kvagent/kvagent/pool/mem"
	"github.com/kvagent/kvagent/pool/pooltest"
)

func TestMain(m *testing.M) {
	if os.Getenv(dram.StormEnv) != "" {
		dram.Storm()
		return
	}
	goleak.VerifyTestMain(m)
}

func open(t testing.TB, o pooltest.Options) pooltest.Pool { return openWith(t, o, nil) }

func openWith(t testing.TB, o pooltest.Options, policy pool.Policy) pooltest.Pool {
	p, err := dram.Open(dram.Options{Bytes: o.Bytes, SlabBytes: o.SlabBytes, Clock: o.Clock, Policy: policy})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func openMem(t testing.TB, o pooltest.Options) pooltest.Pool {
	p, err := mem.Open(mem.Options{Bytes: o.Bytes, Clock: o.Clock})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPool(t *testing.T) { pooltest.TestPool(t, open) }

// TestPoolWithPolicies runs the suite with each policy.
func TestPoolWithPolicies(t *testing.T) {
	for name, policy := range map[string]func() pool.Policy{
		"hazard": func() pool.Policy { return evict.NewHazard() },
		"lru":    func() pool.Policy { return evict.NewLRU() },
	} {
		t.Run(name, func(t *testing.T) {
			pooltest.TestPoolInAnyOrder(
				t, func(t testing.TB, o pooltest.Options) pooltest.Pool { return openWith(t, o, policy()) },
			)
		})
	}
}

func TestAgainstMem(t *testing.T) { pooltest.TestAgainst(t, open, openMem) }

func TestStore(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, specs ...pool.Spec) pool.Store {
		p := open(t, pooltest.Options{Bytes: 1 << 20})
		t.Cleanup(func() { p.Close() })
		return pooltest.NewStore(t, p, specs...)
	})
}
