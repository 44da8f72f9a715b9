package devicetest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

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
