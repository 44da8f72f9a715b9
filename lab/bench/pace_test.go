package bench

import (
	"bytes"
	"encoding/json"
	"testing"
)

func TestBenchPace(t *testing.T) {
	var out bytes.Buffer
	cmd := paceCommand()
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--json", "--steps", "20", "--rounds", "1", "--settle", "20", "--weights", "1MiB", "--memory",
		"64MiB"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	var r paceReport
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	if r.AloneP50US <= 0 || r.FreeP99.Median <= 0 || r.PacedP99.Median <= 0 || r.FreeGBps <= 0 || r.PacedGBps <= 0 {
		t.Fatalf("not measured: %+v", r)
	}
	for _, args := range [][]string{{"--steps", "5"}, {"--threads", "0"}, {"--weights", "1KiB"}, {"--rounds", "0"}} {
		cmd = paceCommand()
		cmd.SetArgs(args)
		if err := cmd.Execute(); err == nil {
			t.Errorf("%v was accepted", args)
		}
	}
}
