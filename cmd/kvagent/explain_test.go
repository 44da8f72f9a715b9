package main

import (
	"strings"
	"testing"
)

// explain, against an agent that has stored a block, and that nobody has asked yet.
func TestExplain(t *testing.T) {
	_, dir, _ := startServe(t)
	fillBlocks(t, dir, 1)
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"", 0, "REASON  TOKENS  LOOK-UPS"},
		{"", 0, "MiB of memory"},
		{"--json", 0, `"lookups": []`},
		{"--block " + strings.Repeat("0", 63) + "1", 0, "stored now"},
		{"--block 00ff", 0, "never stored"},
		{"--block no", exitFailed, "2 to 64 hex digits"},
		{"--request 00 --block 00", exitConfig, "allowed: one of them"},
		{"--request 00ff", exitFailed, "no such look-up"},
		{"--last 0", exitConfig, "1 to 4096"},
		{"--last 4097", exitConfig, "1 to 4096"},
	} {
		args := append([]string{"explain", "--socket-dir", dir}, strings.Fields(c.args)...)
		if out, code := kvagentOutput(t, args...); code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%q: exit %d, want %d, with %q: %s", c.args, code, c.code, c.want, out)
		}
	}
}
