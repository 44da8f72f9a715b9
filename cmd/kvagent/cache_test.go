package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
