package main

import (
	"os"
	"strings"
	"testing"
)

// Where there is no GPU, or no CUDA in the program, a proof says so.
func TestProofWithoutGPU(t *testing.T) {
	if _, err := os.Stat("/dev/nvidiactl"); err == nil || os.Getenv("KVAGENT_LIBCUDA") != "" {
		t.Skip("this machine has a GPU")
	}
	out, code := kvagentOutput(t, "proof")
	if code != exitFailed || !strings.Contains(out, "no GPU to run on") || !strings.Contains(out, "no CUDA") {
		t.Errorf("exit %d, want %d and why:\n%s", code, exitFailed, out)
	}
	if out, code = kvagentOutput(t, "proof", "--check", "everything"); code != exitConfig ||
		!strings.Contains(out, "footprint") {
		t.Errorf("exit %d, want %d and the checks:\n%s", code, exitConfig, out)
	}
}
