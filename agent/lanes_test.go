package agent

import (
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/transfer"
)

// TestLanesOfEachGPU: workers of one GPU share lanes; those of another, and those on CPUs, have their own.
func TestLanesOfEachGPU(t *testing.T) {
	a := &workers{lanes: map[cudaipc.UUID]*transfer.Lanes{}}
	cpu, first, second := a.lanesLocked(cudaipc.UUID{}), a.lanesLocked(cudaipc.UUID{1}), a.lanesLocked(cudaipc.UUID{2})
	if cpu == first || cpu == second || first == second {
		t.Error("workers of two devices wait for each other's lanes")
	}
	if a.lanesLocked(cudaipc.UUID{1}) != first || a.lanesLocked(cudaipc.UUID{}) != cpu {
		t.Error("workers of one device have lanes of their own")
	}
}
