package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/ipc/socketdir"
)

// check answers by its exit code, with the agent's own reason.
func TestCheck(t *testing.T) {
	_, dir, _ := startServe(t)
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"live"}, 0, ""},
		{[]string{"ready"}, 0, ""},
		{[]string{"well"}, exitConfig, "allowed: live, ready"},
		{nil, exitConfig, "accepts 1 arg"},
	} {
		out, code := kvagentOutput(t, append([]string{"check", "--socket-dir", dir}, c.args...)...)
		if code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%v: exit %d, want %d with %q: %s", c.args, code, c.code, c.want, out)
		}
	}
	if err := os.Remove(filepath.Join(dir, socketdir.Session)); err != nil {
		t.Fatal(err)
	}
	if out, code := kvagentOutput(t, "check", "ready", "--socket-dir", dir); code != exitFailed ||
		!strings.Contains(out, "not ready: session.sock was removed") {
		t.Errorf("without the session socket: exit %d: %s", code, out)
	}
	if out, code := kvagentOutput(t, "check", "live", "--socket-dir", t.TempDir()); code != exitFailed ||
		!strings.Contains(out, "not live: no agent answers") {
		t.Errorf("without an agent: exit %d: %s", code, out)
	}
}
