package bench

import (
	"bytes"
	"encoding/json"
	"testing"
)

func TestBenchDisk(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a benchmark")
	}
	var out bytes.Buffer
	cmd := diskCommand()
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--json", "--dir", t.TempDir(), "--bytes", "33554432", "--rounds", "1", "--block-bytes",
		"65536"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	var r diskReport
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	if r.WriteGBps <= 0 || r.RawWriteGBps <= 0 || r.ReadGBps <= 0 || r.RawReadGBps <= 0 ||
		r.Ratio != min(r.WriteRatio, r.ReadRatio) {
		t.Fatalf("not measured: %+v", r)
	}
	if low, median, high := quartiles([]float64{1, 6, 4, 2, 5}, []float64{1, 2, 2, 2, 2}); low != 1 || median != 2 ||
		high != 2.5 {
		t.Fatalf("quartiles of 1 to 3: %v, %v, %v", low, median, high)
	}
	for _, args := range [][]string{{"--bytes", "5"}, {"--block-bytes", "5000"}, {"--rounds", "0"}} {
		cmd = diskCommand()
		cmd.SetArgs(args)
		if err := cmd.Execute(); err == nil {
			t.Errorf("%v was accepted", args)
		}
	}
}
