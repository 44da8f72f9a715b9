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
	for name, s := range map[string]lookupSettings{
		"one":     {form: ipc.FormOwn, clients: 1},
		"several": {form: ipc.FormUpstream, clients: 3},
		"saves":   {form: ipc.FormOwn, clients: 2, saves: true},
	} {
		t.Run(name, func(t *testing.T) {
			s.blocks, s.rounds = 4096, 20
			rows, err := measureLookup(&s)
			if err != nil || len(rows) < len(lookupHashes) {
				t.Fatalf("%d rows, %v", len(rows), err)
			}
			for _, row := range rows {
				if row.P50us <= 0 || row.P99us < row.P50us || (row.SavedGBs > 0) != (name == "saves") {
					t.Errorf("%+v", row)
				}
			}
		})
	}
}
