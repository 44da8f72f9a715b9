package evict

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// chainOf is a chain to be stored, whose entries are those from first on.
func chainOf(first uint32, blocks int, parent uint32) *pool.Insertion {
	in := &pool.Insertion{Now: 1e9, BlockTokens: 512, Parent: parent}
	for i := range uint32(blocks) {
		in.Entries, in.Prints = append(in.Entries, first+i), append(in.Prints, spread(int(first+i)))
	}
	return in
}

// TestStoredLaterIsNewer stores chains within one ms, one in two pieces: nothing of a later one is
// as old as anything of an earlier one.
func TestStoredLaterIsNewer(t *testing.T) {
	h := NewHazard()
	h.Insert(chainOf(1, 20, 0))
	h.Insert(chainOf(21, 20, 20))
	h.Insert(chainOf(41, 24, 0))
	oldest := func(from, end uint32) (age uint32) {
		for e := from; e < end; e++ {
			age = max(age, uint32(h.clock.now)-h.nodes.runOf(h.nodes.at(e)).used)
		}
		return age
	}
	later := oldest(41, 65)
	for e := range uint32(40) {
		if age := oldest(e+1, e+2); age <= later {
			t.Errorf("entry %d is %d ms old, the oldest that was stored later %d", e+1, age, later)
		}
	}
}

// TestStoringTakesNoTimeAfterLooking looks up a chain that was evicted, and stores it: the
// look-up's time counts for both. Another chain, which was not looked up, has its own.
func TestStoringTakesNoTimeAfterLooking(t *testing.T) {
	h := NewHazard()
	looked, other := chainOf(1, 20, 0), chainOf(21, 20, 0)
	h.Insert(looked)
	h.Remove(looked.Entries)
	h.Access(&pool.Use{Now: looked.Now, BlockTokens: looked.BlockTokens, Prints: looked.Prints})
	at := h.clock.now
	if h.Insert(looked); h.clock.now != at {
		t.Errorf("%d ms went by while a chain was stored that was just looked up", h.clock.now-at)
	}
	if h.Insert(other); h.clock.now-at != 20 {
		t.Errorf("%d ms went by for another of 20 blocks", h.clock.now-at)
	}
}
