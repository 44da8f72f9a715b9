package dram_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/evict"
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

func TestPool(t *testing.T) { pooltest.TestPool(t, open) }

// TestPoolWithPolicies runs the suite with each policy.
func TestPoolWithPolicies(t *testing.T) {
	for name, open := range map[string]pooltest.Open{
		"hazard":        func(t testing.TB, o pooltest.Options) pooltest.Pool { return openWith(t, o, evict.NewHazard()) },
		"lru in a file": inAFile(func() pool.Policy { return evict.NewLRU() }),
	} {
		t.Run(name, func(t *testing.T) { pooltest.TestPoolInAnyOrder(t, open) })
	}
}
