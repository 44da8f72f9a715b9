package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

func TestBenchIndexKeepsItsBudget(t *testing.T) {
	var out bytes.Buffer
	cmd := benchIndexCommand()
	cmd.SetOut(&out)
	cmd.SetArgs([]string{"--json", "--blocks", "10000,100000", "--wide-blocks", "100000"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	var r indexReport
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
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
	cmd = benchIndexCommand()
	cmd.SetArgs([]string{"--blocks", "5"})
	if err := cmd.Execute(); err == nil {
		t.Error("--blocks 5 was accepted")
	}
}

func TestBenchPolicyBesideItsBounds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	var trace bytes.Buffer
	for i := range 600 { // three conversations in turn, and each request begins alike
		ids := []int{0}
		for j := range 1 + i/30 {
			ids = append(ids, 1000*(i%3+1)+j)
		}
		if err := json.NewEncoder(&trace).Encode(map[string]any{"hash_ids": ids}); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(file, trace.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	requests, err := readPolicyTrace(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, capacity := range []int{1, 10, 40, 1000} {
		r, err := benchPolicy(requests, capacity)
		if err != nil {
			t.Fatal(err)
		}
		if r.HitRate > r.Opt+1e-9 || r.LRU > r.Opt+1e-9 || r.HitRate < r.LRU-0.02 {
			t.Errorf("capacity %d: pool %.4f, LRU %.4f, optimum %.4f", capacity, r.HitRate, r.LRU, r.Opt)
		}
	}
	if err := os.WriteFile(file, []byte("{\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readPolicyTrace(file); err == nil {
		t.Error("a broken trace was read")
	}
}
