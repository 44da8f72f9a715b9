package bench

import (
	"testing"

	"github.com/kvagent/kvagent/ipc"
)

// The agent is a process of its own: it ends with the measurement, which checks its answers.
func TestBenchLookup(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a benchmark")
	}
	t.Setenv(asCommand, "1")
	rows, err := measureLookup(&lookupSettings{blocks: 4096, rounds: 20, form: ipc.FormOwn})
	if err != nil || len(rows) != 2*len(lookupHashes) {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for _, row := range rows {
		if row.P50us <= 0 || row.P99us < row.P50us {
			t.Errorf("%+v", row)
		}
	}
	s := lookupSettings{blocks: 4096, rounds: 20, form: ipc.FormUpstream}
	if p50, p99, saved := besideSaves(t, s, 3, 128); p50 <= 0 || p99 < p50 || saved <= 0 {
		t.Errorf("beside saves: p50 %v, p99 %v, %v GB/s saved", p50, p99, saved)
	}
}
