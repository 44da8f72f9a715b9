// Package tracetest locates the published trace that tests of eviction policies use.
package tracetest

import (
	"os"
	"path/filepath"
	"testing"
)

const (
	// PathEnv names the file of the conversation trace.
	PathEnv = "KVAGENT_CONVERSATION_TRACE"
	// RequireEnv makes a test fail, not skip, without the trace. CI sets it.
	RequireEnv = "KVAGENT_REQUIRE_TRACE"

	shared = "../shared/traces/conversation_trace.jsonl" // seen from the module's root
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
