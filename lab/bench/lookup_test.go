package bench

import (
	"encoding/json"
	"testing"
)

// Agent and echo are processes of their own: they end with the measurement, and it checks their
// answers.
func TestBenchLookup(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a benchmark")
	}
	for name, args := range map[string][]string{
		"one":     {"--form", "own"},
		"several": {"--form", "upstream", "--clients", "3"},
		"saves":   {"--form", "own", "--clients", "2", "--saves"},
	} {
		t.Run(name, func(t *testing.T) {
			out, code := benchOutput(t, append([]string{"bench", "lookup", "--json", "--blocks", "4096", "--rounds",
				"20"}, args...)...)
			var r struct{ Rows []lookupRow }
			if err := json.Unmarshal([]byte(out), &r); code != 0 || err != nil || len(r.Rows) < len(lookupHashes) {
				t.Fatalf("exit %d, %v: %s", code, err, out)
			}
			for _, row := range r.Rows {
				if row.P50us <= 0 || row.P99us < row.P50us || (row.SavedGBs > 0) != (name == "saves") ||
					(row.EchoP50us > 0) != withEcho || (row.RatioP50 > 0) != withEcho ||
					(row.RatioP99 > 0) != withEcho {
					t.Errorf("%+v", row)
				}
			}
		})
	}
}
