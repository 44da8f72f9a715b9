package evictsim

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func readText(t *testing.T, text string) (*Stream, error) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return ReadTrace(file)
}

// TestTraceBecomesAStream numbers blocks as they come in time, and cuts fractions of a ms off.
func TestTraceBecomesAStream(t *testing.T) {
	s, err := readText(t, `{"timestamp": 7.9, "hash_ids": [900, 30]}
{"timestamp": 5, "hash_ids": [900, 18446744073709551615]}
{"timestamp": 6, "hash_ids": []}`)
	want := []Request{
		{Millis: 5, Blocks: []uint32{0, 1}}, {Millis: 6, Blocks: []uint32{}}, {Millis: 7, Blocks: []uint32{0, 2}},
	}
	if err != nil || !reflect.DeepEqual(s.Requests, want) || s.Blocks != 3 {
		t.Errorf("%+v, %v; want %v", s, err, want)
	}
}

func TestTraceWithoutBlocksIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "no hash_ids in 0 requests",
		`{"timestamp": 5, "hash_ids": []}`: "no hash_ids in 1 requests",
		`{"timestamp": 5}`:                 ":1: hash_ids is missing",
	} {
		if _, err := readText(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want something with %q", text, err, want)
		}
	}
}
