package devicetest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

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

// Freeze stops a process, and returns when none of its threads runs any more: SIGSTOP alone is only
// a request.
func Freeze(t T, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// no event reports to a process that is not the parent when the last thread has stopped
	Until(t, fmt.Sprintf("process %d stops", pid), func() bool { return stopped(t, pid) })
}

func stopped(t T, pid int) bool {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			continue // the thread has ended
		}
		if at := bytes.LastIndexByte(text, ')'); at < 0 || text[at+2] != 'T' { // 123 (name) T ...
			return false
		}
	}
	return true
}
