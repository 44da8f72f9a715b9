package report

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/transfer"
)

// TestStagesOfJobs expects that recording a job allocates nothing.
func TestStagesOfJobs(t *testing.T) {
	m := NewMetrics(nil)
	one := transfer.Times{Copy: time.Millisecond, Copied: true}
	if n := testing.AllocsPerRun(100, func() { m.Stages.Observe(transfer.Save, &one) }); n != 0 {
		t.Errorf("%v allocations for a job", n)
	}
}

// TestFarthestBeyondItsDeadline expects the greatest miss of a deadline to be kept.
func TestFarthestBeyondItsDeadline(t *testing.T) {
	m := NewMetrics(nil)
	if m.CountTime(time.Millisecond, time.Millisecond) || m.overMax.Load() != 0 {
		t.Errorf("in time: %v us", m.overMax.micros())
	}
	if !m.CountTime(7*time.Millisecond, 2*time.Millisecond) || !m.CountTime(100*time.Millisecond, 99*time.Millisecond) {
		t.Error("late, and not said to be")
	}
	if over := m.overMax.micros(); over != 5000 {
		t.Errorf("%v us beyond, want 5000", over)
	}
}
