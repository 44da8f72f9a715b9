package catalog

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
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

// TestUseMarksMeet checks that every reader reads what a writer put as long as the reader's span
// says, and for a period longer at most, whatever spans the two have.
func TestUseMarksMeet(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	span := func() time.Duration {
		return 10*time.Minute + time.Duration(r.Int64N(int64(90*24*time.Hour)))>>r.IntN(12)
	}
	fp := pool.Fingerprint{7}
	for range 20_000 {
		writer, reader := span(), span()
		used := 1_700_000_000 + r.Int64N(1e9)
		there := map[pool.Key]bool{}
		for _, key := range UseKeys(fp, writer, used) {
			there[key] = true
		}
		meet := func(after time.Duration) (met bool) {
			keys := UnusedKeys(fp, reader, used+int64(after/time.Second))
			if len(keys) > 22 {
				t.Fatalf("%d keys are read for %v", len(keys), reader)
			}
			for _, key := range keys {
				met = met || there[key]
				if there[key] && StaleMark(&key, time.Unix(used, 0).Add(after)) {
					t.Fatalf("seed %d: a mark that is read after %v is stale", seed, after)
				}
			}
			return met
		}
		if after := time.Duration(r.Int64N(int64(reader))); !meet(after) {
			t.Fatalf("seed %d: a use %v ago is not seen: reader %v, writer %v", seed, after, reader, writer)
		}
		if after := reader + Period(max(OwnLength(reader), OwnLength(writer))) + time.Second; meet(after) {
			t.Fatalf("seed %d: a use %v ago is seen: reader %v, writer %v", seed, after, reader, writer)
		}
	}
}
