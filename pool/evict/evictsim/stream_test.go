package evictsim

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBadTracesAreRefused names the line and the field of what is wrong.
func TestBadTracesAreRefused(t *testing.T) {
	const good = `{"timestamp": 5, "hash_ids": [1, 2]}` + "\n"
	for _, c := range []struct{ trace, want string }{
		{"", "hash_ids"},
		{`{"timestamp": 5, "hash_ids": []}`, "hash_ids"},
		{good + "{\n", ":2:"},
		{good + "\n", ":2:"},
		{good + `{"hash_ids": [1]}`, ":2: timestamp"},
		{good + `{"timestamp": 7}`, ":2: hash_ids"},
		{good + `{"timestamp": 4, "hash_ids": [1]}`, ":2: timestamp is 4, must be at least 5"},
		{good + `{"timestamp": -4, "hash_ids": [1]}`, ":2: timestamp is -4"},
		{good + `{"timestamp": 9000000000001, "hash_ids": [1]}`, ":2: timestamp is 9000000000001"},
		{good + `{"timestamp": 7.5, "hash_ids": [1]}`, "timestamp"},
		{good + good + `{"timestamp": 7, "hash_ids": [3, -1]}`, ":3: hash_ids[1] is -1"},
		{good + `{"timestamp": 7, "hash_ids": [99999999999999999999]}`, "hash_ids"},
		{good + `{"timestamp": 7, "hash_ids": "1"}`, "hash_ids"},
	} {
		file := filepath.Join(t.TempDir(), "trace.jsonl")
		if err := os.WriteFile(file, []byte(c.trace), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadTrace(file); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want something with %q", c.trace, err, c.want)
		}
	}
}
