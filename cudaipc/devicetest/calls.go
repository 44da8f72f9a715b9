package devicetest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// NoteCalls makes this process's software driver log its calls from now on. The returned function
// counts them by name, without _v2. Nothing may be in flight on the device: C's environment is
// not thread-safe.
func NoteCalls(t *testing.T, d *cuda.Device) func() map[string]int {
	t.Helper()
	Pinned(t, d)
	list := filepath.Join(t.TempDir(), "calls")
	t.Setenv("SOFTCUDA_CALLS", list)
	return func() map[string]int { return ReadCalls(t, list) }
}

// Pinned waits until nothing more of the arena will be pinned.
func Pinned(t T, d *cuda.Device) {
	t.Helper()
	Until(t, "the pinning ends", func() bool { return d.Info().PinDone })
}

// ReadCalls counts the calls that a software driver noted in a file.
func ReadCalls(t *testing.T, list string) map[string]int {
	t.Helper()
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	times := map[string]int{}
	for name := range strings.Lines(string(text)) {
		times[strings.TrimSuffix(strings.TrimSpace(name), "_v2")]++
	}
	return times
}
