package main

import (
	"strings"
	"testing"
)

// hint, against an agent that has stored eight blocks.
func TestHint(t *testing.T) {
	_, dir, _ := startServe(t)
	fillBlocks(t, dir, 8)
	block := strings.Repeat("0", 63) + "1"
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"", 0, "ACTION"},
		{"kv.pin --block " + block + " --for 1m --id mine", 0, "kv.pin  mine"},
		{"kv.pin --block " + block, 0, "accepted  1"},
		{"kv.retain --priority 90 --block " + block, 0, "accepted  1"},
		{"kv.pin --block " + strings.Repeat("f", 64), 0, "missing"},
		{"kv.prefetch --block " + strings.Repeat("f", 64), 0, "rejected"},
		{"--json", 0, `"id": "mine"`},
		{"kv.pin --session nobody", exitFailed, "nothing is remembered"},
		{"kv.pin --request 00ff", exitFailed, "no such look-up"},
		{"kv.pin", exitFailed, "session, request, blocks: allowed: exactly one of them"},
		{"kv.pin --session a --block " + block, exitFailed, "exactly one of them"},
		{"kv.fetch --block " + block, exitFailed, "actions[0].from: missing"},
		{"kv.pin --block xy", exitFailed, `blocks[0]: "xy", allowed: a hash in hex`},
		{"kv.pin --space 00 --block " + block, exitFailed, "fits 0 open spaces"},
		{"kv.keep --block " + block, exitConfig, "allowed: kv.retain, kv.pin"},
		{"kv.retain --priority 101 --session a", exitConfig, "0 to 100"},
		{"kv.pin --for 25h --session a", exitConfig, "24h"},
	} {
		args := append([]string{"hint", "--socket-dir", dir}, strings.Fields(c.args)...)
		if out, code := kvagentOutput(t, args...); code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%q: exit %d, want %d, with %q: %s", c.args, code, c.code, c.want, out)
		}
	}
	if out, _ := kvagentOutput(t, "explain", "--socket-dir", dir); !strings.Contains(out, "kv.pin") {
		t.Errorf("explain says nothing of hints: %s", out)
	}
	if out, _ := kvagentOutput(t, "status", "--socket-dir", dir); !strings.Contains(out, "1 blocks pinned") {
		t.Errorf("status says nothing of the pin: %s", out)
	}
}
