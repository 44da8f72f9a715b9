package evictsim

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

const goodLine = `{"timestamp": 5, "hash_ids": [1, 2]}` + "\n"

func readText(t *testing.T, text string) (*Stream, error) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return ReadTrace(file)
}

// TestBadTracesAreRefused names the line and the field of what is wrong, and what it may be.
func TestBadTracesAreRefused(t *testing.T) {
	for _, c := range []struct{ trace, want string }{
		{"", "hash_ids"},
		{`{"timestamp": 5, "hash_ids": []}`, "hash_ids"},
		{goodLine + "{\n", ":2:"},
		{goodLine + `{"hash_ids": [1]}`, ":2: timestamp"},
		{goodLine + `{"timestamp": 7}`, ":2: hash_ids"},
		{goodLine + `{"timestamp": -4, "hash_ids": [1]}`, ":2: timestamp is -4, must be 0 to 9000000000000"},
		{goodLine + `{"timestamp": 9000000000001, "hash_ids": [1]}`, ":2: timestamp is 9.000000000001e+12, must be 0 to 9000000000000"},
		{goodLine + `{"timestamp": 1e999, "hash_ids": [1]}`, ":2: timestamp is a number 1e999, must be a number from 0 to 9000000000000"},
		{goodLine + `{"timestamp": "7", "hash_ids": [1]}`, ":2: timestamp is a string, must be a number from 0 to 9000000000000"},
		{goodLine + "\n" + goodLine + `{"timestamp": 7, "hash_ids": [3, -1]}`, ":4: hash_ids[1] is -1"},
		{goodLine + `{"timestamp": 7, "hash_ids": [99999999999999999999]}`, ":2: hash_ids is or has a number 99999999999999999999, must be a list of integers from 0 to 9223372036854775807"},
		{goodLine + `{"timestamp": 7, "hash_ids": [1.5]}`, ":2: hash_ids is or has a number 1.5, must be"},
		{goodLine + `{"timestamp": 7, "hash_ids": "1"}`, ":2: hash_ids is or has a string, must be"},
	} {
		if _, err := readText(t, c.trace); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want something with %q", c.trace, err, c.want)
		}
	}
}

// TestUnusualTracesAreRead has traces that are written otherwise than usual and say the same as a plain one, or what is expected.
func TestUnusualTracesAreRead(t *testing.T) {
	plain := []Request{{5, []uint32{0, 1}}, {7, []uint32{0, 2}}}
	for _, c := range []struct {
		name, trace string
		want        []Request
	}{
		{"plain", goodLine + `{"timestamp": 7, "hash_ids": [1, 3]}` + "\n", plain},
		{"no newline at the end", goodLine + `{"timestamp": 7, "hash_ids": [1, 3]}`, plain},
		{"CRLF", strings.ReplaceAll(goodLine+`{"timestamp": 7, "hash_ids": [1, 3]}`+"\n", "\n", "\r\n"), plain},
		{"empty lines", "\n" + goodLine + " \r\n" + `{"timestamp": 7, "hash_ids": [1, 3]}` + "\n\n", plain},
		{"fractions of a ms", `{"timestamp": 5.75, "hash_ids": [1, 2]}` + "\n" + `{"timestamp": 7.0, "hash_ids": [1, 3]}`, plain},
		{"a power of ten", `{"timestamp": 0.5e1, "hash_ids": [1, 2]}` + "\n" + `{"timestamp": 7, "hash_ids": [1, 3]}`, plain},
		{"other fields", `{"chat_id": 3, "type": "text", "timestamp": 5, "turn": null, "hash_ids": [1, 2]}` + "\n" + `{"timestamp": 7, "hash_ids": [1, 3]}`, plain},
		{"not in order", `{"timestamp": 7, "hash_ids": [1, 3]}` + "\n" + goodLine + `{"timestamp": 5, "hash_ids": [1]}`,
			[]Request{{5, []uint32{0, 2}}, {5, []uint32{0}}, {7, []uint32{0, 1}}}},
		{"a request without blocks", goodLine + `{"timestamp": 6, "hash_ids": []}`, []Request{{5, []uint32{0, 1}}, {6, []uint32{}}}},
	} {
		s, err := readText(t, c.trace)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if !reflect.DeepEqual(s.Requests, c.want) {
			t.Errorf("%s: %v, want %v", c.name, s.Requests, c.want)
		}
	}
}
