package evictsim

import (
	"testing"
	"time"
)

// TestLeastOfEachLap has two runs that were disturbed in different laps.
func TestLeastOfEachLap(t *testing.T) {
	a, b := Result{Blocks: laps}, Result{Blocks: laps}
	for i := range laps {
		a.Laps[i], b.Laps[i] = 100, 100
	}
	a.Laps[0], b.Laps[laps-1] = time.Second, time.Second
	if got := a.Least(b).PerAccess(); got != 100 {
		t.Errorf("%v per block, want 100 ns", got)
	}
	if got := a.PerAccess(); got <= 100 {
		t.Errorf("%v per block of one run, want more than 100 ns: it was changed by Least", got)
	}
}
