package evictsim

import (
	"math/bits"
	"math/rand/v2"
	"testing"
)

// smallStream is a few requests for paths of a small tree, so that everything can be tried.
func smallStream(random *rand.Rand) *Stream {
	nodes := 3 + random.IntN(4)
	parent := make([]int, nodes)
	for i := range parent {
		parent[i] = random.IntN(i+1) - 1 // -1 is the root
	}
	s := &Stream{Blocks: nodes}
	for i := range 3 + random.IntN(6) {
		var path []uint32
		for at := random.IntN(nodes); at >= 0; at = parent[at] {
			path = append([]uint32{uint32(at)}, path...)
		}
		s.Requests = append(s.Requests, Request{Millis: int64(i), Blocks: path})
	}
	return s
}

// bestHits tries every set of blocks that can be stored after each request.
func bestHits(s *Stream, capacity, at int, stored uint32, known map[[2]uint32]int) int {
	if at == len(s.Requests) {
		return 0
	}
	key := [2]uint32{uint32(at), stored}
	if n, ok := known[key]; ok {
		return n
	}
	hits, all := 0, stored
	for i, b := range s.Requests[at].Blocks {
		if hits == i && stored>>b&1 == 1 {
			hits++
		}
		all |= 1 << b
	}
	best := 0
	for kept := all; ; kept = (kept - 1) & all { // every subset
		if bits.OnesCount32(kept) <= capacity {
			best = max(best, bestHits(s, capacity, at+1, kept, known))
		}
		if kept == 0 {
			break
		}
	}
	known[key] = hits + best
	return hits + best
}

// slowLRU keeps the blocks in a slice, the one used last in front.
func slowLRU(s *Stream, capacity int) (hits int) {
	var order []uint32
	for i := range s.Requests {
		blocks := s.Requests[i].Blocks
		stored := map[uint32]bool{}
		for _, b := range order {
			stored[b] = true
		}
		for _, b := range blocks {
			if !stored[b] {
				break
			}
			hits++
		}
		used := map[uint32]bool{}
		next := append([]uint32(nil), blocks...)
		for _, b := range blocks {
			used[b] = true
		}
		for _, b := range order {
			if !used[b] {
				next = append(next, b)
			}
		}
		order = next[:min(len(next), capacity)]
	}
	return hits
}

// The two references are correct: compared with an exhaustive search on small streams.
func TestMeasuresAgainstBruteForce(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))
	for i := range 2000 {
		s, capacity := smallStream(random), 1+random.IntN(4)
		if got, want := Optimum(s, capacity).Hits, bestHits(s, capacity, 0, 0, map[[2]uint32]int{}); got != want {
			t.Fatalf(
				"stream %d: the optimum is %d hits, of everything tried the best has %d: %+v, capacity %d", i, got,
				want, s.Requests, capacity,
			)
		}
		if got, want := LRU(s, capacity).Hits, slowLRU(s, capacity); got != want {
			t.Fatalf("stream %d: LRU has %d hits, slowly %d: %+v, capacity %d", i, got, want, s.Requests, capacity)
		}
	}
}
