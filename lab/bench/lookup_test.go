package bench

import (
	"fmt"
	"slices"
	"testing"
)

// The agent is a process of its own: it ends with the measurement, which checks its answers.
func TestBenchLookup(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a benchmark")
	}
	t.Setenv(asCommand, "1")
	rows, err := measureLookup(&lookupSettings{blocks: 4096, rounds: 20, agent: lookupVirtual})
	if err != nil || len(rows) != 2*len(lookupHashes) {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	for _, row := range rows {
		if row.P50us <= 0 || row.P99us < row.P50us {
			t.Errorf("%+v", row)
		}
	}
	s := lookupSettings{blocks: 4096, rounds: 20}
	if p50, p99, saved := besideSaves(t, s, 3, 128); p50 <= 0 || p99 < p50 || saved <= 0 {
		t.Errorf("beside saves: p50 %v, p99 %v, %v GB/s saved", p50, p99, saved)
	}
}

// BenchmarkHistory asks an agent that remembers look-ups and one that does not, in turns; what the
// history costs is the ratio of their p50.
func BenchmarkHistory(b *testing.B) {
	b.Setenv(asCommand, "1")
	var sides [2]*lookupBench
	for i, kind := range []string{lookupVirtual, lookupForgets} {
		side, err := newLookupBench(&lookupSettings{blocks: 1 << 17, agent: kind}, 1)
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
					if err := side.asker.draw(hashes); err != nil {
						b.Fatal(err)
					}
					us, err := side.asker.ask()
					if err != nil {
						b.Fatal(err)
					}
					took[i] = append(took[i], us)
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
