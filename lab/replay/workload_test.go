package replay

import (
	"testing"

	"github.com/kvagent/kvagent/mockengine"
)

// Turns of one conversation go around the engines.
func TestTurnsAlternate(t *testing.T) {
	records := []mockengine.Record{{HashIDs: []uint64{0, 1}}, {HashIDs: []uint64{0, 5}}, {HashIDs: []uint64{0, 1, 2}},
		{HashIDs: []uint64{0, 1, 2, 3}}, {HashIDs: []uint64{0, 5, 6}}}
	want := []int{0, 1, 1, 2, 2}
	for i, e := range dealTurns(records, 3) {
		if e != want[i] {
			t.Errorf("request %d goes to engine %d, want %d", i, e, want[i])
		}
	}
}
