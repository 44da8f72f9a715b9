package mockengine

import "testing"

// Each session of an engine tells of a new weights epoch, in its own time: one told late is no step
// back.
func TestEpochsToldOutOfOrder(t *testing.T) {
	var a attachment
	for _, step := range []struct {
		told  uint32
		isNew bool
		now   uint32
	}{{1, true, 1}, {3, true, 3}, {2, false, 3}, {3, false, 3}, {4, true, 4}} {
		if got := a.raise(step.told); got != step.isNew || a.mu.epoch != step.now {
			t.Errorf("told %d: new %v, epoch %d, want %v, %d", step.told, got, a.mu.epoch, step.isNew, step.now)
		}
	}
}
