package evict

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// TestTimeNeitherStandsNorJumps looks chains of 10 blocks up at odd times.
func TestTimeNeitherStandsNorJumps(t *testing.T) {
	const ms, day = int64(1e6), int64(24 * 3600 * 1e9)
	var c clock
	for i, step := range []struct{ at, want int64 }{
		{100 * day, 10},                       // the first look-up, whenever that is
		{100 * day, 20},                       // no time went by: blocks did
		{100*day + 5*ms, 30},                  // less went by than blocks
		{100*day + 1030*ms, 1030},             // and the pool's clock is ahead again
		{10 * day, 1040},                      // goes back
		{100*day + 1041*ms, 1050},             //
		{100*day + 1060*ms, 1060},             //
		{160 * day, 1060 + longestGap},        // a pause, of more ms than 32 bits count
		{160*day + 500*ms, 1560 + longestGap}, // and on
	} {
		if got := c.advanceBy(
			&pool.Use{Now: step.at, BlockTokens: unitTokens, Prints: make([]uint64, 10)}, 1,
		); int64(got) != step.want {
			t.Fatalf("step %d: %d ms, want %d", i, got, step.want)
		}
	}
	if got := c.advance(160*day + 500*ms); int64(got) != 1560+longestGap {
		t.Errorf("%d ms after nothing was looked up", got)
	}
}
