package dram_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool/advisor"
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

func open(t testing.TB, o dram.Options) *dram.Pool {
	t.Helper()
	p, err := dram.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// options returns the options of a pool of the suite.
func options(o pooltest.Options) dram.Options {
	return dram.Options{Bytes: o.Bytes, SlabBytes: o.SlabBytes, Clock: o.Clock}
}

func TestPool(t *testing.T) {
	pooltest.TestPool(t, func(t testing.TB, o pooltest.Options) pooltest.Pool { return open(t, options(o)) })
}

// TestPoolInAFile runs the suite with a file.
func TestPoolInAFile(t *testing.T) {
	pooltest.TestPool(t, func(t testing.TB, o pooltest.Options) pooltest.Pool {
		with := options(o)
		with.Path = keptPath(t)
		return open(t, with)
	})
}

// TestPoolWithPolicies runs the suite with each policy.
func TestPoolWithPolicies(t *testing.T) {
	for name, policy := range map[string]func() advisor.Policy{
		"hazard":        func() advisor.Policy { return evict.NewHazard() },
		"lru in a file": func() advisor.Policy { return evict.NewLRU() },
	} {
		t.Run(name, func(t *testing.T) {
			pooltest.TestPoolInAnyOrder(t, func(t testing.TB, o pooltest.Options) pooltest.Pool {
				with := options(o)
				if with.Advisor = advisor.New(policy(), nil); name == "lru in a file" {
					with.Path = keptPath(t)
				}
				return open(t, with)
			})
		})
	}
}
