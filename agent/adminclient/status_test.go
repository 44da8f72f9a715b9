package adminclient

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/report"
)

// TestStagesAreShown expects a line for the direction in which jobs copied.
func TestStagesAreShown(t *testing.T) {
	var out bytes.Buffer
	var st admin.Status
	st.Stages = []report.StageStatus{
		{Direction: "save", Stage: "step"}, {Direction: "save", Stage: "report"},
		{Direction: "load", Stage: "step", Jobs: 7, P50MS: 0.25, P99MS: 12.34},
		{Direction: "load", Stage: "report", Jobs: 7, P50MS: 0.011, P99MS: 123},
	}
	if err := printStatus(&out, &st); err != nil {
		t.Fatal(err)
	}
	want := "7 jobs; p50, p99 in ms: step 0.25, 12.3; report 0.011, 123\n"
	if !strings.Contains(out.String(), want) || strings.Contains(out.String(), "save time") {
		t.Errorf("%s\nhas no %q, or a line of saves", out.String(), want)
	}
}
