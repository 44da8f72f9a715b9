package mockengine

import "testing"

// Each session of an engine tells of a new epoch, in its own time: one told late is no step back.
func TestEpochsToldOutOfOrder(t *testing.T) {
	var a attachment
	for _, step := range []struct{ told, now uint32 }{{1, 1}, {3, 3}, {2, 3}, {3, 3}, {4, 4}} {
		if a.raise(step.told); a.mu.epoch != step.now {
			t.Errorf("told %d: epoch %d, want %d", step.told, a.mu.epoch, step.now)
		}
	}
}
