package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Limits of processes.
const (
	strayWithin    = 3 * time.Second // for what agents started to follow them
	pipesWithin    = time.Second     // for what holds the output of a process that ended
	strayPoll      = 20 * time.Millisecond
	maxCommandLine = 100 // characters of one in an error
)

// child is a process that a replay started. It ends with the replay, however that ends: the kernel
// kills it when the thread that started it is gone, so each has a goroutine that keeps its thread.
type child struct {
	process *os.Process
	done    chan struct{}
	err     error // of Wait; valid when done is closed
}

// startChild starts a process in a group of its own: a Ctrl-C is the replay's to handle.
func startChild(cmd *exec.Cmd) (*child, error) {
	c := &child{done: make(chan struct{})}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.WaitDelay = pipesWithin
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := cmd.Start()
		c.process = cmd.Process
		started <- err
		if err == nil {
			c.err = cmd.Wait()
		}
		close(c.done)
	}()
	return c, <-started
}

func (c *child) signal(s syscall.Signal) { _ = c.process.Signal(s) } // an error says that it is gone

// within waits for the end for so long, and reports whether it came.
func (c *child) within(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-c.done:
		return true
	case <-timer.C:
		return false
	}
}

// end sends SIGTERM, and SIGKILL if the process has not ended within d, which is an error.
func (c *child) end(d time.Duration) error {
	c.signal(syscall.SIGTERM)
	c.signal(syscall.SIGCONT)
	if c.within(d) {
		return nil
	}
	c.signal(syscall.SIGKILL)
	<-c.done
	return fmt.Errorf("did not end within %v of SIGTERM", d)
}

// labEnv marks everything that a replay starts, directly or not, by the replay that started it.
const labEnv = "KVAGENT_REPLAY_ID"

// markLab gives what this process starts from now on its mark.
func markLab() (mark string, err error) {
	mark = fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano())
	return mark, os.Setenv(labEnv, mark)
}

// strays waits until no process has the mark but this one. Those that are left after strayWithin
// are killed, and named in the error.
func strays(mark string) error {
	for end := time.Now().Add(strayWithin); ; time.Sleep(strayPoll) {
		left := marked(labEnv + "=" + mark)
		if len(left) == 0 {
			return nil
		}
		if time.Now().Before(end) {
			continue
		}
		var bad []error
		for pid, command := range left {
			_ = syscall.Kill(pid, syscall.SIGKILL) // an error says that it is gone
			bad = append(bad, fmt.Errorf("process %d is left: %s", pid, command))
		}
		return errors.Join(bad...)
	}
}

// marked are the command lines of the processes but this one whose environment has a variable, by
// process number.
func marked(variable string) map[int]string {
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
		found[pid] = commandLine(pid)
	}
	return found
}

// commandLine is that of a process, with blanks; empty if it has ended.
func commandLine(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return ""
	}
	text := strings.TrimSpace(strings.ReplaceAll(string(b), "\x00", " "))
	return text[:min(len(text), maxCommandLine)]
}

// childrenOf are the numbers of the processes whose parent is pid.
func childrenOf(pid int) (all []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is well-formed
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(b), ") ") // proc(5): state and parent come after the name
		fields := strings.Fields(rest)
		if len(fields) < 2 || fields[1] != strconv.Itoa(pid) {
			continue
		}
		if child, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			all = append(all, child)
		}
	}
	return all
}
