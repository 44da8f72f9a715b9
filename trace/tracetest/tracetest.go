// Package tracetest locates the traces that tests of eviction policies use.
package tracetest

import (
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"testing"
)

const (
	// PathEnv names the file of the conversation trace.
	PathEnv = "KVAGENT_CONVERSATION_TRACE"
	// RequireEnv makes a test fail, not skip, without the trace. CI sets it.
	RequireEnv = "KVAGENT_REQUIRE_TRACE"

	// seen from the module's root
	shared = "../shared/traces/conversation_trace.jsonl"
	agents = "../shared/traces/agent_sessions.jsonl.gz"
)

// Conversation returns the path of the conversation trace, of which
// testdata/conversation_1000.jsonl is the beginning. Without it the test fails or, unless
// RequireEnv is set, is skipped.
func Conversation(t testing.TB) string {
	t.Helper()
	path := os.Getenv(PathEnv)
	if path == "" {
		path = filepath.Join(moduleRoot(t), shared)
	}
	if _, err := os.Stat(path); err != nil {
		const text = "the conversation trace is not there, so the figures of this test are not held: %v\n" +
			"`export " + PathEnv + "=$(scripts/env trace)` gets it; it is " +
			"FAST25-release/traces/conversation_trace.jsonl of github.com/kvcache-ai/Mooncake"
		if os.Getenv(RequireEnv) != "" {
			t.Fatalf(text, err)
		}
		t.Skipf("SKIPPED: "+text, err)
	}
	return path
}

// Agents returns the path of a copy, in a folder of the test's own, of the trace of coding agents'
// sessions. Without the trace the test is skipped: it is in no public place.
func Agents(t testing.TB) string {
	t.Helper()
	packed, err := os.Open(filepath.Join(moduleRoot(t), agents))
	if err != nil {
		t.Skipf("SKIPPED: the trace of agents' sessions is not there, so this test's figures are not held: %v", err)
	}
	defer func() { _ = packed.Close() }()
	lines, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "agents.jsonl")
	out, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, lines); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func moduleRoot(t testing.TB) string {
	t.Helper()
	folder, err := filepath.Abs(".")
	for ; err == nil && folder != "/"; folder = filepath.Dir(folder) {
		if _, missing := os.Stat(filepath.Join(folder, "go.mod")); missing == nil {
			return folder
		}
	}
	t.Fatalf("no go.mod above the test's folder: %v", err)
	return ""
}
