package devicetest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// NoteCalls makes this process's software driver log its calls from now on. The returned function
// counts them by name, without _v2. Nothing may be in flight on the device: C's environment is
// not thread-safe.
func NoteCalls(t *testing.T, d *cuda.Device) func() map[string]int {
	t.Helper()
	for i := 0; !d.Info().PinDone && i < 10_000; i++ {
		time.Sleep(time.Millisecond)
	}
	list := filepath.Join(t.TempDir(), "calls")
	t.Setenv("SOFTCUDA_CALLS", list)
	return func() map[string]int { return ReadCalls(t, list) }
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
