package size

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool/evict/evictsim"
)

const trace = "../../testdata/conversation_1000.jsonl"

func output(t *testing.T, args ...string) string {
	t.Helper()
	var out strings.Builder
	cmd := Command()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// The figures are those of the simulation, a recording's files are one trace, and the curve is a
// picture.
func TestSize(t *testing.T) {
	lines, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	all := strings.SplitAfter(string(lines), "\n")
	for name, part := range map[string][]string{"trace-000001.jsonl": all[:400], "trace-000002.jsonl": all[400:]} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(strings.Join(part, "")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var r report
	text := output(t, "--trace", folder, "--capacity-blocks", "1000,7850,21514", "--block-bytes", "2MiB", "--json")
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatal(err)
	}
	stream, err := evictsim.ReadTrace(trace)
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range r.Rows {
		want := evictsim.LRU(stream, one.Blocks).HitRate()
		if math.Abs(one.LRU-want) > 1e-9 || one.Optimum < one.Default {
			t.Errorf("%+v, want %.4f by LRU", one, want)
		}
	}
	if r.Requests != 1000 || r.Unique != stream.Blocks || r.Bend.Blocks != 7850 || r.Enough.Blocks != 21514 ||
		r.Enough.Bytes != 21514<<21 {
		t.Errorf("%+v", r)
	}
	if text := output(t, "--trace", trace, "--capacity-blocks", "5"); !strings.Contains(text, "the curve bends at 5") {
		t.Error(text)
	}
}

func TestSizeRefuses(t *testing.T) {
	for args, want := range map[string]string{
		"": "trace: not given", "--trace /nowhere": "no such file", "--trace " + t.TempDir(): "no trace in it",
		"--trace x --capacity-blocks 0": "capacity-blocks: 0, allowed: 1 to",
	} {
		cmd := Command()
		cmd.SetArgs(strings.Fields(args))
		cmd.SetOut(&strings.Builder{})
		cmd.SetErr(&strings.Builder{})
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
	}
}
