package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/transfer/pace"
)

// TestPaceIsShown expects a line for a device whose copies are or were limited, and for no other.
func TestPaceIsShown(t *testing.T) {
	var out bytes.Buffer
	var st admin.Status
	st.Paces = []pace.Report{
		{Device: "cpu", Setting: "auto"},
		{Device: "GPU-1", Setting: "auto", Rate: 3 << 30, Slowdown: 1.42,
			Counts: pace.Counts{Cuts: 5, Raises: 2}, SaveWaitS: 1.5},
	}
	if err := printStatus(&out, &st); err != nil {
		t.Fatal(err)
	}
	if want := "auto: 3.0 GiB/s, decode steps x 1.42 beside saves; 5 cuts, 2 raises, waited 1.5 s"; !strings.Contains(
		out.String(), want) || strings.Contains(out.String(), "pace cpu") {
		t.Errorf("%s\nhas no %q, or a line of the CPUs", out.String(), want)
	}
}
