package catalog

import (
	"slices"
	"testing"
)

// TestOneMarkerIsAlwaysHeardOf checks that the markers that one node asks for and another keeps
// have exactly one in common. So a node learns of some later epoch from any node that knows one,
// whatever it has missed.
func TestOneMarkerIsAlwaysHeardOf(t *testing.T) {
	for m := uint64(1); m < 300; m++ {
		kept := Below(m)
		for n := range m {
			both := slices.DeleteFunc(Above(n), func(e uint64) bool { return !slices.Contains(kept, e) })
			if len(both) != 1 || both[0] <= n || both[0] > m {
				t.Fatalf("a node in epoch %d hears of %v from one in epoch %d, want one beyond %d", n, both, m, n)
			}
		}
	}
	for _, n := range []uint64{0, 1, MaxEpoch / 3, MaxEpoch - 1, MaxEpoch} {
		if a, b := len(Above(n)), len(Below(n)); a > 32 || b > 32 {
			t.Errorf("epoch %d: %d and %d markers, want 32 at most", n, a, b)
		}
	}
}
