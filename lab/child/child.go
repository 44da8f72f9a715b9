// Package child starts processes for the lab, ends them, and keeps their output.
package child

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Limits of processes.
const (
	StrayWithin    = 3 * time.Second       // for the children of agents to end after them
	Poll           = 20 * time.Millisecond // between two looks at all processes
	pipesWithin    = time.Second           // for the output of an ended process to close
	maxCommandLine = 100                   // characters of one in an error
)

// Process is a process that a replay started. It ends with the replay, however that ends: the
// kernel kills it when the thread that started it has ended, so each has a goroutine that keeps its
// thread.
type Process struct {
	OS   *os.Process
	Done chan struct{}
	Err  error // of Wait; valid when done is closed
}

// Start starts a process in a group of its own: the replay handles Ctrl-C.
func Start(cmd *exec.Cmd) (*Process, error) {
	c := &Process{Done: make(chan struct{})}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.WaitDelay = pipesWithin
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := cmd.Start()
		c.OS = cmd.Process
		started <- err
		if err == nil {
			c.Err = cmd.Wait()
		}
		close(c.Done)
	}()
	return c, <-started
}

// Signal sends a signal.
func (c *Process) Signal(s syscall.Signal) { _ = c.OS.Signal(s) } // an error means that it has ended

// Within waits at most that long for the end, and reports whether it came.
func (c *Process) Within(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c.Done:
		return true
	case <-timer.C:
		return false
	}
}

// End sends SIGTERM, and SIGKILL if the process has not ended within d, which is an error.
func (c *Process) End(d time.Duration) error {
	c.Signal(syscall.SIGTERM)
	c.Signal(syscall.SIGCONT)
	if c.Within(d) {
		return nil
	}
	c.Signal(syscall.SIGKILL)
	<-c.Done
	return fmt.Errorf("did not end within %v of SIGTERM", d)
}

// MarkEnv is the variable that marks everything that a replay starts, directly or not.
const MarkEnv = "KVAGENT_REPLAY_ID"

// Mark marks everything that this process starts from now on.
func Mark() (mark string, err error) {
	mark = fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano())
	return mark, os.Setenv(MarkEnv, mark)
}

// Strays waits until no process has the mark except this one. It kills those that are left after
// StrayWithin, and names them in the error.
func Strays(mark string) error {
	for end := time.Now().Add(StrayWithin); ; time.Sleep(Poll) {
		left := Marked(MarkEnv + "=" + mark)
		if len(left) == 0 {
			return nil
		}
		if time.Now().Before(end) {
			continue
		}
		var bad []error
		for pid, command := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL) // an error means that it has ended
			bad = append(bad, fmt.Errorf("process %d is left: %s", pid, command))
		}
		return errors.Join(bad...)
	}
}

// Marked returns the command lines of the other processes whose environment has a variable, by
// process number.
func Marked(variable string) map[int]string {
	found := make(map[int]string)
	dirs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is well-formed
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		env, err := os.ReadFile(dir + "/environ") // a zombie has none
		if err != nil || !strings.Contains("\x00"+string(env), "\x00"+variable+"\x00") {
			continue
		}
		found[pid] = CommandLine(pid)
	}
	return found
}

// CommandLine returns the command line of a process, with blanks; empty if it has ended.
func CommandLine(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	text := strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
	return text[:min(len(text), maxCommandLine)]
}

// keepLog is how much of a process's output is kept for an error, bytes.
const keepLog = 64 << 10

// Tail keeps the end of what is written.
type Tail struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write keeps p, and drops the older half if that is much.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.b.Len() > keepLog {
		t.b.Next(t.b.Len() / 2)
	}
	return t.b.Write(p)
}

// String returns what is kept.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}
