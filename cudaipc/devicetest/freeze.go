package devicetest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Freeze stops a process, and returns when none of its threads runs any more: SIGSTOP alone is only
// a request.
func Freeze(t testing.TB, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(testTimeout); !stopped(t, pid); {
		if time.Now().After(end) {
			t.Fatalf("process %d does not stop", pid)
		}
		time.Sleep(time.Millisecond) // no event reports when the last thread has stopped
	}
}

func stopped(t testing.TB, pid int) bool {
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
