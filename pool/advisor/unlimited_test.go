package advisor

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// A pool that evicts nothing has every block that was stored once. While they all fit into the
// sample the count is exact; beyond that it stays close, and its memory as it is.
func TestUnlimitedPool(t *testing.T) {
	for _, c := range []struct {
		blocks uint64
		within float64 // of the true count
	}{{4 << 10, 0}, {256 << 10, 0.1}} {
		var u unlimited
		random := rand.New(rand.NewPCG(20, 3))
		stored, want, asked := map[uint64]bool{}, 0, 0
		print := func(block uint64) uint64 { // well mixed, as the pool's are
			block += 0x9E3779B97F4A7C15 * (block + 1)
			block = (block ^ block>>30) * 0xBF58476D1CE4E5B9
			block = (block ^ block>>27) * 0x94D049BB133111EB
			return block ^ block>>31
		}
		for asked < int(4*c.blocks) && asked < 8<<20 {
			first := random.Uint64N(c.blocks)
			use := pool.Use{}
			for i := range uint64(16) {
				use.Prints = append(use.Prints, print(first+i))
			}
			asked += len(use.Prints)
			use.Entries = make([]uint32, random.IntN(2)) // found in the pool at hand
			for _, p := range use.Prints[len(use.Entries):] {
				if stored[p] {
					want++
				}
			}
			u.looked(&use)
			u.stored(use.Prints)
			for _, p := range use.Prints {
				stored[p] = true
			}
		}
		if off := math.Abs(float64(u.extra)-float64(want)) / float64(want); off > c.within || want == 0 {
			t.Errorf("of %d blocks: %d missed blocks counted, want %d: %.3f off; one block in %d is sampled", c.blocks,
				u.extra, want, off, 1<<u.bits)
		}
		if len(u.sets) != 1<<setBits {
			t.Errorf("%d sets", len(u.sets))
		}
		t.Logf("of %d blocks: %d counted, want %d, one in %d sampled", c.blocks, u.extra, want, 1<<u.bits)
	}
}

// Allocates nothing after the first block, and a print of 0 is none.
func TestUnlimitedPoolAllocatesNothing(t *testing.T) {
	var u unlimited
	u.looked(&pool.Use{Prints: []uint64{0, 1}})
	u.stored([]uint64{0, 1 << 40})
	use := &pool.Use{Prints: []uint64{0, 1 << 40, 2 << 40}}
	if n := testing.AllocsPerRun(100, func() { u.stored(use.Prints); u.looked(use) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	if u.extra == 0 {
		t.Error("a block that was stored is not counted")
	}
}
