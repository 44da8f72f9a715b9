package admin

import (
	"testing"
	"time"
)

// The look-up farthest beyond its deadline is kept with its time, so that it can be held against
// what the machine did just then.
func TestFarthestBeyondItsDeadlineIsKept(t *testing.T) {
	m := NewMetrics(nil, nil)
	if m.CountTime(time.Millisecond, time.Millisecond) || m.worstLate.get() != (lateLookup{}) {
		t.Errorf("in time: %+v", m.worstLate.get())
	}
	before := time.Now()
	if !m.CountTime(7*time.Millisecond, 2*time.Millisecond) || !m.CountTime(100*time.Millisecond, 99*time.Millisecond) {
		t.Error("late, and not said to be")
	}
	one := m.worstLate.get()
	if one.over != 5*time.Millisecond || one.took != 7*time.Millisecond {
		t.Errorf("%+v, want 5 ms beyond, 7 ms in all", one)
	}
	if answered := one.read.Add(one.took); answered.Before(before) || answered.After(time.Now()) {
		t.Errorf("answered %v, it was between %v and now", answered, before)
	}
}
