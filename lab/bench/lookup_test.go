package bench

import (
	"testing"

	"github.com/kvagent/kvagent/ipc"
)

// Agent and echo are processes of their own: they end with the measurement, and it checks their
// answers.
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
				if row.P50us <= 0 || row.P99us < row.P50us || (row.SavedGBs > 0) != (name == "saves") ||
					(row.EchoP50us > 0) != withEcho || (row.RatioP50 > 0) != withEcho ||
					(row.RatioP99 > 0) != withEcho {
					t.Errorf("%+v", row)
				}
			}
		})
	}
}
