package evictsim

import (
	"testing"

	"github.com/kvagent/kvagent/pool/evict"
)

// TestLearnedStartsBetter plays the beginning of the conversation trace to a policy that has
// learned from what came before in an empty pool, as after a restart that lost the blocks, and to a
// fresh one.
func TestLearnedStartsBetter(t *testing.T) {
	s, err := ReadTrace("../../../testdata/conversation_1000.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	half := len(s.Requests) / 2
	before, after := *s, *s
	before.Requests, after.Requests = s.Requests[:half], s.Requests[half:]
	for _, capacity := range []int{2000, 4000} {
		former := evict.NewHazard()
		Run(&before, former, capacity)
		later := evict.NewHazard()
		if err := later.Learn(former.Learned()); err != nil {
			t.Fatal(err)
		}
		learned, fresh := Run(&after, later, capacity), Run(&after, evict.NewHazard(), capacity)
		t.Logf(
			"%d blocks: %d of %d hit after learning, %d by a fresh policy", capacity, learned.Hits, learned.Blocks,
			fresh.Hits,
		)
		if learned.Hits <= fresh.Hits {
			t.Errorf("%d blocks: %d hits after learning, a fresh policy has %d", capacity, learned.Hits, fresh.Hits)
		}
	}
}
