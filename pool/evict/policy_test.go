package evict_test

import (
	"fmt"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/evict"
)

var policies = []struct {
	name string
	make func() advisor.Policy
}{
	{"hazard", func() advisor.Policy { return evict.NewHazard() }},
	{"lru", func() advisor.Policy { return evict.NewLRU() }},
}

// TestVictims plays pools at random: never a hole, never a held entry, never nothing while
// something could go.
func TestVictims(t *testing.T) {
	for _, p := range policies {
		for seed := range uint64(12) {
			t.Run(fmt.Sprintf("%s/seed=%d", p.name, seed), func(t *testing.T) {
				w := newWorld(t, p.make(), seed)
				for range 4000 {
					w.step()
				}
				if h, ok := w.policy.(*evict.Hazard); ok {
					if err := h.Check(); err != nil {
						t.Fatal(err)
					}
				}
				if got, want := w.policy.Report().Entries, len(w.stored()); got != want {
					t.Fatalf("the policy has %d entries, the pool %d", got, want)
				}
			})
		}
	}
}

// TestVictimsOfSmallPools plays many pools that are young: few entries, of which most are held or
// have children.
func TestVictimsOfSmallPools(t *testing.T) {
	seeds := uint64(1000)
	if testing.Short() {
		seeds = 200
	}
	for _, p := range policies {
		t.Run(p.name, func(t *testing.T) {
			for seed := range seeds {
				w := newWorld(t, p.make(), seed)
				for range 150 {
					w.step()
				}
				if t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
		})
	}
}

// TestPinnedArePassedOver pins all but the newest of many entries.
func TestPinnedArePassedOver(t *testing.T) {
	for _, p := range policies {
		t.Run(p.name, func(t *testing.T) {
			policy := p.make()
			const n = 3000
			v := &lone{held: map[uint32]bool{}}
			for e := uint32(1); e <= n; e++ {
				in := pool.Insertion{
					Now: int64(e) * 1e6, BlockTokens: 512, Entries: []uint32{e}, Prints: []uint64{print(e)},
				}
				policy.Insert(&in)
				v.held[e] = e != n
			}
			switch got := policy.Victim(n*1e6, 1, 0, v); got {
			case n:
			case 0:
				t.Fatalf("no victim, want %d, the only one that is not pinned", n)
			default:
				t.Fatalf("evicts a pinned entry: %d, want %d", got, n)
			}
			if v.asked > 2*n+100 {
				t.Errorf("%d questions to find one of %d", v.asked, n)
			}
			v.asked = 0
			v.held[n] = true
			if got := policy.Victim(n*1e6, 1, 0, v); got != 0 {
				t.Fatalf("evicts a pinned entry: %d, and all are pinned", got)
			}
			if v.asked > 20_000 {
				t.Errorf("%d questions to find that all are pinned", v.asked)
			}
			delete(v.held, 7)
			if got := policy.Victim(n*1e6+1e6, 1, 0, v); got != 7 {
				t.Fatalf("victim %d, want 7, which is pinned no more", got)
			}
		})
	}
}

// lone is a pool without chains.
type lone struct {
	held  map[uint32]bool
	asked int
}

func (l *lone) Child(uint32) uint32 { return 0 }
func (l *lone) Held(e uint32) bool  { l.asked++; return l.held[e] }

func print(n uint32) uint64 {
	x := uint64(n) * 0x9e3779b97f4a7c15
	return (x ^ x>>29) * 0xbf58476d1ce4e5b9
}

// TestSteadyStateDoesNotAllocate runs look-ups, insertions and evictions in a full pool.
func TestSteadyStateDoesNotAllocate(t *testing.T) {
	for _, p := range policies {
		t.Run(p.name, func(t *testing.T) {
			policy := p.make()
			const n = 5000
			v := &lone{}
			u := pool.Use{BlockTokens: 512, Prints: make([]uint64, 1), Entries: make([]uint32, 0, 1)}
			in := pool.Insertion{BlockTokens: 512, Entries: make([]uint32, 1), Prints: make([]uint64, 1)}
			gone := make([]uint32, 1)
			next, e := uint32(0), uint32(0)
			step := func() {
				next++
				u.Now, in.Now = int64(next)*1e7, int64(next)*1e7
				u.Prints[0], in.Prints[0] = print(next), print(next)
				if e++; e > n {
					e = policy.Victim(u.Now, 1, 0, v)
					gone[0] = e
					policy.Remove(gone)
				}
				policy.Access(&u)
				in.Entries[0] = e
				policy.Insert(&in)
				if next >= n {
					e = n
				}
			}
			for range 20 * n {
				step()
			}
			if got := testing.AllocsPerRun(2000, step); got != 0 {
				t.Errorf("%g allocations per access in a full pool", got)
			}
			r := policy.Report()
			if most := int64(n*64 + n*8*16 + 9<<18); r.Bytes > most {
				t.Errorf("%d bytes for %d entries and %d ghosts, at most %d", r.Bytes, r.Entries, r.Ghosts, most)
			}
		})
	}
}

func TestEqualRunsAreEqual(t *testing.T) {
	run := func() string {
		w := newWorld(t, evict.NewHazard(), 99)
		for range 3000 {
			w.step()
		}
		return fmt.Sprintf("%+v %v", w.policy.Report(), w.stored())
	}
	if a, b := run(), run(); a != b {
		t.Fatalf("two runs from one seed differ:\n%s\n%s", a, b)
	}
}
