package policysim

import (
	"bufio"
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"testing"
)

func TestLRUByHand(t *testing.T) {
	trace := Trace{{1, 2}, {1, 2}, {3}, {1, 2}, {4, 5}, {1}}
	for capacity, want := range map[int]int{0: 0, 1: 0, 2: 2, 3: 4, 5: 5} {
		if got := LRU(trace, capacity); got != want {
			t.Errorf("capacity %d: %d hits, want %d", capacity, got, want)
		}
	}
}

func TestBeladyByHand(t *testing.T) {
	// With room for one, 1 is kept through 2 and 3, which LRU loses.
	trace := Trace{{1}, {2}, {3}, {1}, {2}}
	for capacity, want := range map[int]int{0: 0, 1: 1, 2: 2, 3: 2} {
		if got := Belady(trace, capacity); got != want {
			t.Errorf("capacity %d: %d hits, want %d", capacity, got, want)
		}
	}
}

// TestBeladyIsBest compares with every possible choice on small traces of single blocks.
func TestBeladyIsBest(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		var trace Trace
		for range 9 {
			trace = append(trace, []int{r.IntN(4)})
		}
		for capacity := 1; capacity < 4; capacity++ {
			best := try(trace, map[int]bool{}, capacity)
			if got := Belady(trace, capacity); got != best {
				t.Fatalf("%v with %d: %d hits, the best is %d", trace, capacity, got, best)
			}
			if lru := LRU(trace, capacity); lru > best {
				t.Fatalf("%v with %d: LRU has %d hits, the best is %d", trace, capacity, lru, best)
			}
		}
	}
}

// try is the most hits any choice of what to keep can have.
func try(t Trace, stored map[int]bool, capacity int) int {
	if len(t) == 0 {
		return 0
	}
	b := t[0][0]
	if stored[b] {
		return 1 + try(t[1:], stored, capacity)
	}
	best := try(t[1:], stored, capacity)
	with := map[int]bool{b: true}
	for s := range stored {
		with[s] = true
	}
	if len(with) <= capacity {
		return max(best, try(t[1:], with, capacity))
	}
	for s := range stored {
		delete(with, s)
		best = max(best, try(t[1:], with, capacity))
		with[s] = true
	}
	return best
}

// TestPublishedFacts holds both to what is known of a real trace.
func TestPublishedFacts(t *testing.T) {
	trace := conversation(t)
	all := float64(trace.Blocks())
	for _, f := range []struct {
		name     string
		hits     func(Trace, int) int
		capacity int
		rate     float64
	}{
		{"no limit", LRU, math.MaxInt, 0.3664},
		{"LRU", LRU, 3_000, 0.065}, {"LRU", LRU, 10_000, 0.211}, {"LRU", LRU, 30_000, 0.326}, {"LRU", LRU, 50_000, 0.355},
		{"Belady", Belady, 3_000, 0.2945}, {"Belady", Belady, 10_000, 0.366},
	} {
		if got := float64(f.hits(trace, f.capacity)) / all; math.Abs(got-f.rate) > 0.0005 {
			t.Errorf("%s with %d blocks: %.4f, known is %.4f", f.name, f.capacity, got, f.rate)
		}
	}
}

func conversation(t *testing.T) (trace Trace) {
	file := os.Getenv("KVAGENT_TEST_TRACE")
	if file == "" {
		file = "../../../shared/traces/conversation_trace.jsonl"
	}
	f, err := os.Open(file)
	if err != nil {
		t.Skipf("SKIPPED: the known hit rates are of Mooncake's conversation trace, which is not there (KVAGENT_TEST_TRACE names it): %v", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var request struct {
			HashIDs []int `json:"hash_ids"`
		}
		if err := json.Unmarshal(lines.Bytes(), &request); err != nil {
			t.Fatal(err)
		}
		trace = append(trace, request.HashIDs)
	}
	return trace
}
