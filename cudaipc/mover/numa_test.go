package mover

import "testing"

func TestParseCPUs(t *testing.T) {
	set, err := parseCPUs("0-2,5")
	if err != nil || set.Count() != 4 || !set.IsSet(5) || set.IsSet(3) {
		t.Errorf("%d processors (%v), want 0, 1, 2 and 5", set.Count(), err)
	}
	for _, bad := range []string{"", "x", "3-1", "1-"} {
		if _, err := parseCPUs(bad); err == nil {
			t.Errorf("processors %q: no error", bad)
		}
	}
}
