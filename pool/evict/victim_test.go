package evict_test

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// chain is a pool with one long chain: entry e+1 is a child of e.
type chain struct{ last, asked uint32 }

func (c *chain) Child(e uint32) uint32 {
	c.asked++
	if e < c.last {
		return e + 1
	}
	return 0
}

func (c *chain) Held(uint32) bool { return false }

// TestLongChainGoesFromItsEnd evicts a chain with the blocks of a prompt of a million tokens,
// without walking down it for each block.
func TestLongChainGoesFromItsEnd(t *testing.T) {
	for _, p := range policies {
		t.Run(p.name, func(t *testing.T) {
			policy := p.make()
			const n = 50_000
			in := pool.Insertion{BlockTokens: 16}
			for e := uint32(1); e <= n; e++ {
				in.Entries, in.Prints = append(in.Entries, e), append(in.Prints, print(e))
			}
			policy.Insert(&in)
			policy.Access(&pool.Use{Now: 60e9, BlockTokens: 16, Prints: in.Prints[:10], Entries: in.Entries[:10]})
			c := &chain{last: n}
			for calls := 0; c.last > 0; calls++ {
				if calls > n+n/1000 {
					t.Fatalf("%d calls of Victim, and %d of %d entries are left", calls, c.last, n)
				}
				got := policy.Victim(100e9, 1, 0, c)
				if got == 0 {
					continue // the work allowed for one call
				}
				if got != c.last {
					t.Fatalf("hole in a chain: the victim is %d, the end is %d", got, c.last)
				}
				policy.Remove([]uint32{got})
				c.last--
			}
			if c.asked > 4*n {
				t.Errorf("%d questions to evict a chain of %d", c.asked, n)
			}
		})
	}
}
