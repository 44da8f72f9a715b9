package bench

import (
	"fmt"
	"slices"
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

// BenchmarkHistory asks an agent that remembers look-ups and one that does not, in turns; what the
// history costs is the ratio of their p50.
func BenchmarkHistory(b *testing.B) {
	b.Setenv(asCommand, "1")
	var sides [2]*lookupBench
	for i := range sides {
		side, err := newLookupBench(&lookupSettings{blocks: 1 << 17, clients: 1, forgets: i == 1}, 1)
		if err != nil {
			b.Fatal(err)
		}
		defer side.close()
		sides[i] = side
	}
	for _, hashes := range []int{1, 128} {
		b.Run(fmt.Sprintf("hashes=%d", hashes), func(b *testing.B) {
			var took [2][]float64
			for b.Loop() {
				for i, side := range sides {
					a := side.askers[0]
					if err := a.draw(ipc.FormOwn, hashes, 1); err != nil {
						b.Fatal(err)
					}
					one, err := side.turn()
					if err != nil {
						b.Fatal(err)
					}
					took[i] = append(took[i], one...)
				}
			}
			slices.Sort(took[0])
			slices.Sort(took[1])
			with, without := took[0][len(took[0])/2], took[1][len(took[1])/2]
			b.ReportMetric(with, "us-p50")
			b.ReportMetric(without, "us-p50-without")
			b.ReportMetric(with/without, "of-without")
		})
	}
}
