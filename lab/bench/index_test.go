package bench

import "testing"

func TestBenchIndexKeepsItsBudget(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a benchmark")
	}
	r, err := measureIndex([]int{10_000, 100_000}, 100_000)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) != 2 || r.Rows[0].Blocks != 10_000 || r.Rows[1].Blocks != 100_000 {
		t.Fatalf("rows %+v", r.Rows)
	}
	for _, row := range r.Rows {
		if row.BytesPerBlock <= 64 || row.BytesPerBlock > 100 {
			t.Errorf("%.1f bytes per block at %d, allowed are 100", row.BytesPerBlock, row.Blocks)
		}
		if row.NsPerBlock <= 0 || row.MapNsPerBlock <= 0 || row.PinUs2048 <= 0 {
			t.Errorf("not measured: %+v", row)
		}
	}
	if r.BytesPerBlock8Shards > 156 {
		t.Errorf("%.1f bytes per block of 8 shards, allowed are 156", r.BytesPerBlock8Shards)
	}
	cmd := indexCommand()
	cmd.SetArgs([]string{"--blocks", "5"})
	if err := cmd.Execute(); err == nil {
		t.Error("--blocks 5 was accepted")
	}
}
