package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// cache ls and rm, against an agent whose filler has stored two blocks.
func TestCache(t *testing.T) {
	_, dir, _ := startServe(t, "--tier", "disk:"+filepath.Join(t.TempDir(), "disk")+"?capacity=64MiB&write=save")
	file := filepath.Join(t.TempDir(), "hashes")
	if err := os.WriteFile(file, []byte(strings.Repeat("00", 31)+"01\n"+strings.Repeat("00", 31)+"02\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	if out, code := kvagentOutput(t, "mock", "--fill", file, "--socket-dir", dir); code != 0 {
		t.Fatalf("fill: exit %d: %s", code, out)
	}
	for _, c := range []struct {
		args []string
		code int
		want []string
	}{
		{[]string{"ls"}, 0, []string{"SPACE", "  2\n"}},
		{[]string{"ls", "--model", "nobody's"}, 0, []string{"SPACE"}},
		{[]string{"ls", "--space", "xyz"}, exitFailed, []string{"hex digits"}},
		{[]string{"rm"}, exitConfig, []string{"no filter given"}},
		{[]string{"rm", "--tenant", "nobody's"}, 0, []string{"of 0 spaces"}},
		{[]string{"ls", "--json"}, 0, []string{`"blocks": 2`}},
	} {
		out, code := kvagentOutput(t, append([]string{"cache"}, append(c.args, "--socket-dir", dir)...)...)
		if code != c.code {
			t.Errorf("%v: exit %d, want %d: %s", c.args, code, c.code, out)
		}
		for _, want := range c.want {
			if !strings.Contains(out, want) {
				t.Errorf("%v: not in the output: %q\n%s", c.args, want, out)
			}
		}
	}
	out, _ := kvagentOutput(t, "cache", "ls", "--socket-dir", dir)
	space := strings.Fields(strings.Split(out, "\n")[1])[0]
	if out, code := kvagentOutput(t, "cache", "rm", "--space", space[:8], "--socket-dir", dir); code != 0 ||
		!strings.Contains(out, "of 1 spaces") {
		t.Fatalf("rm: exit %d: %s", code, out)
	}
	if out, _ := kvagentOutput(t, "cache", "ls", "--socket-dir", dir); !strings.Contains(out, "  0\n") {
		t.Errorf("blocks are left: %s", out)
	}
}

// cache ls and rm of one tier, whose spaces have other names after a reset. A block deleted in the
// tier is still in memory.
func TestCacheOfATier(t *testing.T) {
	_, dir, _ := startServe(t, "--tier", "disk:"+filepath.Join(t.TempDir(), "disk")+"?capacity=64MiB&write=save")
	fillBlocks(t, dir, 5)
	held := waitForShards(t, dir, 5)
	if len(held.Spaces) != 1 || !held.Spaces[0].Known || held.Spaces[0].Bytes <= 0 || !held.Complete {
		t.Fatalf("%+v", held)
	}
	space := held.Spaces[0].Space
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"ls --tier disk", 0, space},
		{"ls --tier disk --model nobody's", 0, "SPACE"},
		{"ls --tier tape", exitFailed, "no such tier, allowed: disk"},
		{"rm --tier disk", exitConfig, "no filter given"},
		{"rm --tier memory --space " + space, exitConfig, "allowed: a tier below it"},
		{"rm --tier disk --space ffff", 0, "removed 0 shards"},
		{"ls --tier disk --json", 0, `"shards": 5`},
		{"rm --tier disk --space " + space[:8], 0, "removed 5 shards"},
		{"ls", 0, "  5\n"},
		{"rm --space " + space, 0, "of 1 spaces"}, // from now on it has another name in the tier
	} {
		wantCache(t, dir, c.args, c.code, c.want)
	}
	waitForShards(t, dir, 0)
	fillBlocks(t, dir, 3)
	if held = waitForShards(t, dir, 3); held.Spaces[0].Space != space || !held.Spaces[0].Known {
		t.Errorf("after a reset: %+v, want space %s", held.Spaces, space)
	}
	wantCache(t, dir, "rm --space "+space, 0, "of 1 spaces")
	if held = waitForShards(t, dir, 3); len(held.Spaces) != 1 || held.Spaces[0].Known {
		t.Errorf("what was stored before a reset: %+v, want a name that is not known", held.Spaces)
	}
	wantCache(t, dir, "rm --tier disk --json --space "+held.Spaces[0].Space, 0, `"shards":3`)
}

func wantCache(t *testing.T, dir, args string, code int, want string) {
	t.Helper()
	out, got := kvagentOutput(t, append(append([]string{"cache"}, strings.Fields(args)...), "--socket-dir", dir)...)
	if got != code || !strings.Contains(out, want) {
		t.Errorf("%s: exit %d, want %d, with %q: %s", args, got, code, want, out)
	}
}

// fillBlocks has n blocks stored.
func fillBlocks(t *testing.T, dir string, n int) {
	t.Helper()
	var hashes strings.Builder
	for i := range n {
		fmt.Fprintf(&hashes, "%064x\n", i+1)
	}
	file := filepath.Join(t.TempDir(), "hashes")
	if err := os.WriteFile(file, []byte(hashes.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, code := kvagentOutput(t, "mock", "--fill", file, "--socket-dir", dir); code != 0 {
		t.Fatalf("fill: exit %d: %s", code, out)
	}
}

// waitForShards asks until the disk holds so many, because saves reach it asynchronously.
func waitForShards(t *testing.T, dir string, n int64) (held admin.CacheTier) {
	t.Helper()
	defer func() {
		if t.Failed() {
			t.Logf("the disk holds %+v, want %d shards", held, n)
		}
	}()
	pooltest.Until(t, "the disk holds all shards", func() bool {
		out, code := kvagentOutput(t, "cache", "ls", "--tier", "disk", "--json", "--socket-dir", dir)
		held = admin.CacheTier{}
		if err := json.Unmarshal([]byte(out), &held); code != 0 || err != nil {
			t.Fatalf("exit %d, %v: %s", code, err, out)
		}
		shards := int64(0)
		for i := range held.Spaces {
			shards += held.Spaces[i].Shards
		}
		return shards == n
	})
	return held
}
