package slab

import (
	"math/rand/v2"
	"testing"
)

func TestSpansAgainstSet(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	var s spans
	taken := map[uint32]uint32{}
	owner := map[uint32]bool{}
	give := func(first uint32) {
		s.give(first, taken[first])
		for i := range taken[first] {
			delete(owner, first+i)
		}
		delete(taken, first)
	}
	for range 3000 {
		if r.IntN(2) == 0 && len(taken) > 0 {
			for first := range taken {
				give(first)
				break
			}
			continue
		}
		n := uint32(1 + r.IntN(20))
		first, ok := s.take(n)
		if !ok {
			t.Fatal("no room")
		}
		taken[first] = n
		for i := range n {
			if owner[first+i] {
				t.Fatalf("cell %d given twice", first+i)
			}
			owner[first+i] = true
		}
	}
	for first := range taken {
		give(first)
	}
	if s.top != 0 || len(s.free) != 0 {
		t.Fatalf("all given back, and yet %d below %d are in pieces: %v", len(s.free), s.top, s.free)
	}
	if s.high == 0 || s.high > 3000*20 {
		t.Fatalf("high water %d", s.high)
	}
}
