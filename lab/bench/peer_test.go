package bench

import (
	"encoding/json"
	"testing"
)

func TestBenchPeer(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a benchmark")
	}
	out, code := benchOutput(t, "bench", "peer", "--json", "--bytes", "16777216", "--rounds", "1")
	var r peerReport
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
		t.Fatalf("%s: %v, exit %d", out, err, code)
	}
	if len(r.Rows) != len(peerBlocks) || r.Ratio <= 0 {
		t.Fatalf("not measured: %+v", r)
	}
	for _, row := range r.Rows {
		if row.PlainGBps <= 0 || row.KeyGBps <= 0 || row.TLSGBps <= 0 || row.KeyRatio < r.Ratio || row.TLSRatio <= 0 ||
			row.PlainCPUsGB <= 0 || row.KeyCPUsGB <= 0 || row.TLSCPUsGB <= 0 {
			t.Errorf("not measured: %+v", row)
		}
	}
	for _, args := range [][]string{{"--bytes", "5"}, {"--rounds", "0"}, {"--streams", "17"}, {"--batch-bytes", "1"}} {
		if out, code := benchOutput(t, append([]string{"bench", "peer"}, args...)...); code == 0 {
			t.Errorf("%v was accepted: %s", args, out)
		}
	}
}
