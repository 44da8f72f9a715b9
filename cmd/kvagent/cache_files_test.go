package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/pool/dram"
)

// A file of an agent that does not come back is named by the next one beside it, also if that one
// starts cold, and its memory is given back on request; one in use stays.
func TestAbandonedFilesAreReclaimed(t *testing.T) {
	own := poolFile(t)
	left := filepath.Join(filepath.Dir(own), "left")
	for _, path := range []string{own, left} {
		p, err := dram.Open(dram.Options{Bytes: 1 << 20, Path: path})
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	cmd, _, log := startServe(t, "--dram-path", own) // of another size: cold
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{filepath.Dir(own)}, 0, "abandoned"},
		{[]string{filepath.Dir(own), "--reclaim", "1h"}, 0, "removed 0 files"},
		{[]string{filepath.Dir(own), "--reclaim", "0s"}, 0, "removed 1 files"},
		{[]string{filepath.Dir(own)}, 0, "live"},
		{[]string{filepath.Dir(own), "--reclaim", "-1s"}, exitConfig, "allowed: 0s to"},
		{[]string{filepath.Join(filepath.Dir(own), "nothing")}, exitFailed, "no such file"},
	} {
		out, code := kvagentOutput(t, append([]string{"cache", "files"}, c.args...)...)
		if code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%v: exit %d, want %d with %q: %s", c.args, code, c.code, c.want, out)
		}
	}
	if _, err := os.Stat(left); err == nil {
		t.Error("the abandoned file is there still")
	}
	if _, err := os.Stat(own); err != nil {
		t.Errorf("the file in use: %v", err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if said := log.String(); !strings.Contains(said, "no agent uses") || !strings.Contains(said, left) ||
		!strings.Contains(said, "starts empty") {
		t.Errorf("the log does not name %s: %s", left, said)
	}
}
