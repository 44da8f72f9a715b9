package main

import (
	"bytes"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// events against an agent whose engines have KV events off, and without an agent.
func TestEvents(t *testing.T) {
	cmd, dir, _ := startServe(t)
	for _, c := range []struct {
		args string
		code int
		want string
	}{
		{"", 0, "enable_kv_cache_events"},
		{"--model any", 0, "TOKENS BEFORE"},
		{"--json", 0, `"event":"off"`},
		{"--space xyz", exitFailed, "hex digits"},
		{"--tier disk", exitConfig, "unknown flag"},
		{"extra", exitConfig, "extra"},
	} {
		args := append([]string{"events", "--socket-dir", dir}, strings.Fields(c.args)...)
		if out, code := kvagentOutput(t, args...); code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%q: exit %d, want %d, with %q: %s", c.args, code, c.code, c.want, out)
		}
	}
	follow, said := kvagentCommand(t, "events", "--follow", "--socket-dir", dir), &processLog{}
	follow.Stdout, follow.Stderr = said, said
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	pooltest.Until(t, "the command follows", func() bool {
		return strings.Contains(said.String(), "--kv-events-config")
	})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("serve: %v", err)
	}
	if err := follow.Wait(); err == nil || follow.ProcessState.ExitCode() != exitFailed ||
		!strings.Contains(said.String(), "the agent has ended") {
		t.Errorf("the agent has ended: %v: %s", err, said)
	}
	if out, code := kvagentOutput(t, "events", "--socket-dir", dir); code != exitFailed ||
		!strings.Contains(out, "no agent answers") {
		t.Errorf("without an agent: exit %d: %s", code, out)
	}
}

// Lines as an operator reads them.
func TestEventLine(t *testing.T) {
	group, before := uint8(1), 512
	hash := strings.Repeat("ab", 24) + "0123456789abcdef"
	line := admin.EventLine{
		Time: time.Date(2026, 11, 23, 18, 0, 1, 5e6, time.Local), Event: "stored", Space: strings.Repeat("6f", 16),
		Model: "llama", Blocks: 12, Group: &group, Medium: "CPU", First: hash, Last: hash, Before: &before,
	}
	missed := admin.EventLine{Time: line.Time, Event: "missed", Space: line.Space, Model: "llama", Blocks: 7}
	unknown := line
	unknown.Event, unknown.Before = "removed", nil
	for _, c := range []struct {
		line admin.EventLine
		want string
	}{
		{line, "2026-11-23 18:00:01.005 6f6f6f6f llama 1 CPU stored 12 0123456789abcdef 0123456789abcdef 512"},
		{unknown, "2026-11-23 18:00:01.005 6f6f6f6f llama 1 CPU removed 12 0123456789abcdef 0123456789abcdef " +
			"not known"},
		{missed, "2026-11-23 18:00:01.005 6f6f6f6f llama missed 7"},
		{admin.EventLine{Event: admin.EventOff}, ""},
	} {
		var out bytes.Buffer
		if err := printEvent(&out, &c.line); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(strings.Fields(out.String()), " "); got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
	}
}
