package report

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/transfer"
)

// TestStagesOfJobs expects quantiles as precise as the buckets, of jobs that copied alone, and that
// recording a job allocates nothing.
func TestStagesOfJobs(t *testing.T) {
	m := NewMetrics(nil)
	for _, s := range m.Stages.status() {
		if s.Jobs != 0 || s.P50MS != 0 || s.P99MS != 0 {
			t.Errorf("%+v before any job", s)
		}
	}
	for range 90 {
		m.Stages.Observe(transfer.Load, &transfer.Times{Copy: 3 * time.Millisecond, Copied: true})
	}
	for range 10 {
		m.Stages.Observe(transfer.Load, &transfer.Times{Copy: 70 * time.Second, Copied: true})
	}
	m.Stages.Observe(transfer.Load, &transfer.Times{Copy: time.Hour})
	for _, s := range m.Stages.status() {
		if s.Direction != "load" || s.Stage != "copy" {
			continue
		}
		if s.Jobs != 100 || s.P50MS < 2 || s.P50MS > 5 || s.P99MS != 20_000 { // the last bound
			t.Errorf("%+v, want a p50 of 2 to 5 ms and the last bound", s)
		}
	}
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
