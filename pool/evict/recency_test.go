package evict

import (
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// TestRecencyCountsByTime compares the spans with a list of their blocks, in chains of up to many
// times the blocks of a span.
func TestRecencyCountsByTime(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	var r recency
	now := uint32(1<<32 - 100_000) // so that times wrap
	r.restart(now)
	var used []uint32 // of each block of LRU
	for range 3000 {
		room := 1 + random.IntN(5000)
		r.grain = max(1, room/grains)
		blocks := 1 + random.IntN(1500)
		now += 1 + uint32(blocks)
		step := r.step(blocks)
		r.open(blocks, step, now)
		if n := r.end - r.first; n > maxSpans {
			t.Fatalf("%d spans", n)
		}
		for i := blocks - 1; i >= 0; i-- {
			at := now - uint32(i/step)
			if len(used) > 0 && random.IntN(3) == 0 {
				j := random.IntN(len(used))
				r.remove(used[j])
				used[j] = at
			} else {
				used = append(used, at)
			}
			r.add(at)
		}
		for r.overfull(room, now) {
			if _, ok := r.drop(); !ok {
				t.Fatal("a span is over, and cannot be dropped")
			}
		}
		kept := used[:0]
		for _, at := range used {
			if r.has(at) {
				kept = append(kept, at)
			}
		}
		if used = kept; len(used) != r.blocks {
			t.Fatalf("%d blocks are counted, %d were used since the cutoff", r.blocks, len(used))
		}
		if s := r.spans[r.first]; r.blocks > max(room, blocks)+int(s.blocks) {
			t.Fatalf("LRU has %d blocks in spans of %d, and room for %d", r.blocks, s.blocks, room)
		}
	}
}

// TestLookUpsBreakNoSpan opens a span at a time that already has one, and expects its blocks to
// stay.
func TestLookUpsBreakNoSpan(t *testing.T) {
	var r recency
	r.restart(0)
	r.open(1, 1, 10)
	r.add(10)
	r.add(10)
	r.open(1, 1, 10)
	r.remove(10)
	if s := r.at(10); s.blocks != 1 || r.blocks != 1 {
		t.Errorf("%d blocks in the span, %d in all, one is left", s.blocks, r.blocks)
	}
}

// TestSpansOfAChainStay checks that the spans opened for a chain are there when its blocks are
// stored, after any number of look-ups and drops.
func TestSpansOfAChainStay(t *testing.T) {
	var r recency
	r.restart(0)
	now := uint32(0)
	for r.end < maxSpans-100 { // so that spans are merged while those of the chain are opened
		now += 2
		r.open(1, 1, now)
		r.add(now)
	}
	now += 1000
	r.open(511, r.step(511), now)
	for {
		if _, ok := r.drop(); !ok {
			break
		}
	}
	for i := range 511 {
		if at := now - uint32(i/r.step(511)); !r.has(at) || r.at(at).from != at {
			t.Fatalf("block %d of the chain has no span of its ms", i)
		}
	}
}

// TestLongIdleKindsBeginAnew stores blocks of a kind that is new, and of one of which nothing was
// used, after more than half of what times can tell apart.
func TestLongIdleKindsBeginAnew(t *testing.T) {
	h := NewHazard()
	store := func(kind uint8, e uint32) {
		h.Insert(&pool.Insertion{
			Now: h.clock.now * 1e6, BlockTokens: 512, Kind: kind, Entries: []uint32{e},
			Prints: []uint64{spread(int(e))},
		})
	}
	for e := range uint32(50) {
		h.clock.now += 1000
		store(0, e+1)
	}
	h.clock.now += 1<<31 + 5000
	for e := range uint32(50) {
		h.clock.now += 1000
		store(uint8(e%2), e+100)
	}
	for _, e := range []uint32{148, 149} {
		k, r := h.kinds[h.nodes.at(e).kind], h.nodes.runOf(h.nodes.at(e))
		if age := uint32(h.clock.now) - r.used; age > 5000 || r.half != young || k.recency.end-k.recency.first < 10 {
			t.Errorf(
				"entry %d, just stored, is %d ms old, in half %d, and LRU has %d spans", e, age, r.half,
				k.recency.end-k.recency.first,
			)
		}
	}
	if old := h.nodes.runOf(h.nodes.at(1)); old.half != 1 {
		t.Error("what was not used for 24 days is young")
	}
	if err := h.Check(); err != nil {
		t.Error(err)
	}
}

// TestOnlyVictimsAreLost drops an entry whose number a victim had.
func TestOnlyVictimsAreLost(t *testing.T) {
	h := NewHazard()
	h.missBudget.blocks = 100
	for e := range uint32(10) {
		h.Insert(&pool.Insertion{
			Now: int64(e) * 1e9, BlockTokens: 512, Entries: []uint32{e + 1}, Prints: []uint64{spread(int(e))},
		})
	}
	h.prefer(func(bin int) float32 { return 1 })
	e := h.Victim(10e9, 1, noneHeld{})
	h.Remove([]uint32{e})
	lost := h.lost
	h.Insert(&pool.Insertion{Now: 11e9, BlockTokens: 512, Entries: []uint32{e}, Prints: []uint64{spread(99)}})
	if h.Remove([]uint32{e}); h.lost != lost {
		t.Errorf("%d blocks are lost after one was dropped, %d before", h.lost, lost)
	}
}
