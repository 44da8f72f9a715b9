package kvagent_test

import (
	"os/exec"
	"path/filepath"
	"testing"
)

// TestMutantsApply checks that each patch of testdata/mutants applies to the current code. Running
// their tests takes minutes (scripts/mutants).
func TestMutantsApply(t *testing.T) {
	patches, err := filepath.Glob("testdata/mutants/*.patch")
	if err != nil || len(patches) == 0 {
		t.Fatalf("%d patches, %v", len(patches), err)
	}
	for _, patch := range patches {
		if out, err := exec.CommandContext(t.Context(), "patch", "-s", "-p1", "--dry-run", "-i",
			patch).CombinedOutput(); err != nil {
			t.Errorf("%s does not apply: %v\n%s", patch, err, out)
		}
	}
}
