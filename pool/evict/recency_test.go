package evict

import (
	"math/rand/v2"
	"testing"
)

// TestRecencyCountsByTime holds the spans to a list of the blocks they stand for, in chains of up to many times what a span may have.
func TestRecencyCountsByTime(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	var r recency
	r.init()
	var used []uint32              // of each block of LRU
	now := uint32(1<<32 - 100_000) // so that times wrap
	r.spans[0].from, r.last = now, now
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
		for r.over(room, now) {
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

// TestLookUpsBreakNoSpan: blocks used at the time at which a span would begin are not taken for its own.
func TestLookUpsBreakNoSpan(t *testing.T) {
	var r recency
	r.init()
	r.open(1, 1, 10)
	r.add(10)
	r.add(10)
	r.open(1, 1, 10)
	r.remove(10)
	if s := r.at(10); s.blocks != 1 || r.blocks != 1 {
		t.Errorf("%d blocks in the span, %d in all, one is left", s.blocks, r.blocks)
	}
}

// TestSpansOfAChainStay: what was opened for a chain is there when its blocks are stored, however many look-ups there are and whatever is dropped.
func TestSpansOfAChainStay(t *testing.T) {
	var r recency
	r.init()
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
