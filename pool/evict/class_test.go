package evict

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// TestClassTellsTheLastGap looks a prompt up again after gaps, while it is stored and after it
// went.
func TestClassTellsTheLastGap(t *testing.T) {
	h := NewHazard()
	now := int64(0)
	u := pool.Use{BlockTokens: 512, Prints: []uint64{spread(1)}}
	look := func(seconds int64) (gap uint8) {
		now += seconds * 1e9
		u.Now = now
		h.Access(&u)
		if len(u.Entries) == 0 {
			class, ok := h.awaited.take(u.Prints[0])
			if s, w := h.ghosts.find(u.Prints[0]); !ok && w >= 0 {
				class = s.info[w].class()
			}
			return uint8(class % gaps)
		}
		return uint8(h.nodes.runOf(h.nodes.at(1)).class % gaps)
	}
	if got := look(0); got != 0 {
		t.Errorf("gap %d of a prompt that is new", got)
	}
	h.Insert(&pool.Insertion{Now: now, BlockTokens: 512, Entries: []uint32{1}, Prints: u.Prints})
	u.Entries = []uint32{1}
	for _, seconds := range []int64{10, 200, 8} {
		if got, want := look(seconds), gapOf(uint32(seconds)*1000); got != want {
			t.Errorf("class %d after %d s, want %d", got, seconds, want)
		}
	}
	h.Remove([]uint32{1})
	u.Entries = nil
	if got, want := look(60), gapOf(60_000); got != want {
		t.Errorf("class %d of a block that went, %d ms after its use, want %d", got, 60_000, want)
	}
	if a, b := gapOf(5_000), gapOf(40_000); a == b || gapOf(1) == 0 || gapOf(1<<31) != gaps-1 {
		t.Errorf("5 s and 40 s are %d and %d, 1 ms is %d, 24 days are %d", a, b, gapOf(1), gapOf(1<<31))
	}
}
