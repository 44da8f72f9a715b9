package cudaipc

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestNothingWaitsForAllOfAGPU expects that no code waits for all of a GPU's work, and no stream
// for an event of an engine. symbols.h lists the driver's functions that cu refers to, called or
// not.
func TestNothingWaitsForAllOfAGPU(t *testing.T) {
	forbidden := regexp.MustCompile(`cuCtxSynchronize|cuDeviceSynchronize|cuStreamWaitEvent|` +
		`cu\.Synchronize|cu\.Ctx\b|\.Unlock\(\) // cu`)
	var files []string
	for _, pattern := range []string{"*.go", "*/*.go", "driver/*.c"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	if len(files) < 40 {
		t.Fatalf("only %d files: this test looks at the wrong folder", len(files))
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if name == "nosync_test.go" {
			continue
		}
		if name == "driver/await.go" { // for engines, which may wait for events of ours
			text = regexp.MustCompile("cuStreamWaitEvent").ReplaceAll(text, nil)
		} else if name != "engine/cuda_stream.go" && strings.Contains(string(text), "AwaitEvent(") {
			t.Errorf("%s: AwaitEvent: only an engine's stream may wait for an event of another process", name)
		}
		for i, line := range strings.Split(string(text), "\n") {
			if found := forbidden.FindString(line); found != "" {
				t.Errorf("%s:%d: %s", name, i+1, found)
			}
		}
	}
}
