package agent

import (
	"strings"
	"testing"
)

// TestStagesAreShown expects each job that copied to be in the metrics and in the debug log
// with its stages, and one that found nothing in the log alone.
func TestStagesAreShown(t *testing.T) {
	r := newRig(t)
	_, workers, answer := r.joinEngine(register("a"))
	if got := workers[0].save(answer.Epoch, chain(1, 4), 0); !all(got, blockOK) {
		t.Fatalf("save: %v", got)
	}
	for from, want := range map[byte]uint8{1: blockOK, 9: blockMissing} {
		if got := workers[0].load(answer.Epoch, 0, chain(from, 4), 8); !all(got, want) {
			t.Fatalf("load: %v", got)
		}
	}
	_, text := r.admin("GET", "/metrics")
	for _, series := range []string{`{direction="load",stage="step"} 1`, `{direction="save",stage="report"} 1`} {
		if !strings.Contains(text, "kvagent_transfer_stage_seconds_count"+series+"\n") {
			t.Errorf("/metrics has no %s", series)
		}
	}
	lines := r.logs.FilterMessage("load").FilterFieldKey("report").All()
	if len(lines) != 2 || lines[0].ContextMap()["copied"] == lines[1].ContextMap()["copied"] {
		t.Errorf("lines of two loads: %v", lines)
	}
}
