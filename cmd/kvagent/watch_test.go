package main

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/pool/pooltest"
)

// status --watch refreshes until it is interrupted, and goes on when the agent has ended.
func TestStatusWatch(t *testing.T) {
	agent, dir, _ := startServe(t)
	watch, shown := kvagentCommand(t, "status", "--watch", "--socket-dir", dir), &processLog{}
	watch.Stdout, watch.Stderr = shown, shown
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = watch.Process.Kill() }) // it has ended, unless the test failed
	pooltest.Until(t, "the status is shown twice, with rates", func() bool {
		text := shown.String()
		return strings.Count(text, "ready, process") >= 2 && strings.Contains(text, "now: 0.0 look-ups/s, no tokens")
	})
	end := func(p *os.Process, wait func() error) {
		t.Helper()
		if err := p.Signal(syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		if err := wait(); err != nil {
			t.Error(err)
		}
	}
	end(agent.Process, agent.Wait)
	pooltest.Until(t, "the agent's end is shown", func() bool {
		return strings.Contains(shown.String(), "no agent answers")
	})
	end(watch.Process, watch.Wait)
	if strings.Contains(shown.String(), "\x1b") {
		t.Errorf("escapes, though this is no terminal: %q", shown)
	}
	if out, code := kvagentOutput(t, "status", "--watch", "--json", "--socket-dir", dir); code != 2 {
		t.Errorf("with --json: %d %s", code, out)
	}
}

// In a terminal what does not fit is cut, and counted, so that nothing scrolls.
func TestScreen(t *testing.T) {
	const home, end, below = "\x1b[H", "\x1b[K", "\x1b[J"
	for _, test := range []struct {
		text          string
		rows, columns int
		want          string
	}{
		{"a\nb\n\n", 24, 80, home + "a" + end + "\r\nb" + end + below},
		{"a\nb\nc\n", 2, 80, home + "a" + end + "\r\n(2 more lines)" + end + below},
		{"äöü\n", 24, 2, home + "äö" + end + below},
		{"a\x1b[2J\n", 24, 80, home + "a\ufffd[2J" + end + below},  // from an engine's name
		{"a\nb\n", 0, 0, home + "a" + end + "\r\nb" + end + below}, // the size is not known
	} {
		if got := screen(test.text, test.rows, test.columns); got != test.want {
			t.Errorf("%q in %d x %d: %q, want %q", test.text, test.rows, test.columns, got, test.want)
		}
	}
}
