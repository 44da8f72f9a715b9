package pooltest

import (
	"runtime"
	"strings"
	"testing"
	"time"
)

// WaitLimit is how long a test waits for what must come.
const WaitLimit = time.Minute

// Pauses between two polls of Until: they grow from the first to the last.
const (
	firstPause = 100 * time.Microsecond
	lastPause  = 5 * time.Millisecond
)

// Until polls until a condition without an event of its own holds, such as one in another process,
// and ends the test if it does not hold within WaitLimit.
func Until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	pause := firstPause
	for end := time.Now().Add(WaitLimit); !ok(); pause = min(2*pause, lastPause) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", WaitLimit, what)
		}
		time.Sleep(pause)
	}
}

// Parked reports whether a goroutine of this process waits in a function, such as
// agent.(*registry).admit. The state is that of runtime.Stack, such as select.
func Parked(state, function string) bool {
	all := make([]byte, 4<<20)
	for one := range strings.SplitSeq(string(all[:runtime.Stack(all, true)]), "\n\n") {
		head, frames, _ := strings.Cut(one, "\n")
		if strings.Contains(head, "["+state) && strings.Contains(frames, function+"(") {
			return true
		}
	}
	return false
}
