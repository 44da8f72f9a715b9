package devicetest

import "time"

// WaitLimit is how long a test waits for what must come.
const WaitLimit = time.Minute

// Pauses between two polls of Until: they grow from the first to the last.
const (
	firstPause = 50 * time.Microsecond
	lastPause  = 2 * time.Millisecond
)

// Until polls until a condition without an event of its own holds, such as one in another process
// or on a GPU, and ends the test if it does not hold within WaitLimit.
func Until(t T, what string, holds func() bool) {
	t.Helper()
	pause := firstPause
	for end := time.Now().Add(WaitLimit); !holds(); pause = min(2*pause, lastPause) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", WaitLimit, what)
		}
		time.Sleep(pause)
	}
}
