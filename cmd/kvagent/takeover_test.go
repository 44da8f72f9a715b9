package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// poolFile returns a path on tmpfs that is removed after the test.
func poolFile(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Skipf("SKIPPED: no tmpfs on /dev/shm: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // a leftover of a failed test does no harm
	return filepath.Join(dir, "pool")
}

// An agent that is killed is followed by one that has its blocks, at once and in the same
// directory.
func TestKilledAgentIsFollowed(t *testing.T) {
	path := poolFile(t)
	cmd, dir, _ := startServe(t, "--dram-path", path)
	if out, err := kvagentCommand(t, "mock", "--socket-dir", dir, "--requests", "20", "--block-bytes",
		"4096").CombinedOutput(); err != nil {
		t.Fatalf("mock: %v\n%s", err, out)
	}
	waitStatus(t, dir, "blocks_stored", func(n float64) bool { return n > 0 })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	next := kvagentCommand(t, "serve", "--socket-dir", dir, "--pool", "16MiB", "--dram-path", path)
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	waitStatus(t, dir, "pid", func(n float64) bool { return int(n) == next.Process.Pid })
	waitStatus(t, dir, "blocks_stored", func(n float64) bool { return n > 0 })
	_ = cmd.Wait() // it was killed
	if err := next.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := next.Wait(); err != nil {
		t.Errorf("the second agent ended with %v", err)
	}
}

// A second agent on the file of one that lives is told who has it, and leaves it the file.
func TestLivingAgentKeepsItsFile(t *testing.T) {
	path := poolFile(t)
	cmd, _, _ := startServe(t, "--dram-path", path)
	t.Setenv(testLimits, "takeover=500ms")
	out, code := kvagentOutput(t, "serve", "--socket-dir", filepath.Join(t.TempDir(), "s"), "--pool", "16MiB",
		"--dram-path", path)
	if want := fmt.Sprintf("in use by process %d", cmd.Process.Pid); code != exitHeld || !strings.Contains(out, want) {
		t.Errorf("exit %d, want %d with %q: %s", code, exitHeld, want, out)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the file of an agent that lives was abandoned: %v", err)
	}
	_ = cmd.Process.Signal(syscall.SIGTERM) // of the children of this test
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// A mover of a dead agent that still has the file is waited for.
func TestLingeringMoverIsWaitedFor(t *testing.T) {
	path := poolFile(t)
	p, err := dram.Open(dram.Options{Bytes: 16 << 20, Path: path})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.OpenSpace(pool.Spec{Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{4096}}}}); err != nil {
		t.Fatal(err)
	}
	_, fd := p.Arena()
	shared, err := syscall.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(shared), path)
	mover := exec.Command("sleep", "60") // it holds the open file as its descriptor 3
	mover.ExtraFiles = []*os.File{file}
	if err := mover.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mover.Process.Kill() }) // it has ended, unless the test failed
	_ = file.Close()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	args := []string{"serve", "--socket-dir", filepath.Join(t.TempDir(), "s"), "--pool", "16MiB", "--dram-path", path}
	var log processLog
	t.Setenv(testLimits, "takeover=1h")
	next := kvagentCommand(t, args...)
	next.Stderr = &log
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = next.Process.Kill() }) // it has ended, unless the test failed
	pooltest.Until(t, "the mover is waited for", func() bool {
		return strings.Contains(log.String(), "waiting for another agent")
	})
	_ = mover.Process.Kill()
	_ = mover.Wait() // it was killed
	waitStatus(t, args[2], "pid", func(n float64) bool { return int(n) == next.Process.Pid })
	if strings.Contains(log.String(), "is abandoned") {
		t.Errorf("the file was abandoned: %s", &log)
	}
	_ = next.Process.Signal(syscall.SIGTERM) // of the children of this test
	if err := next.Wait(); err != nil {
		t.Error(err)
	}
}

func TestDramPathOnADiskIsRefused(t *testing.T) {
	path := filepath.Join("/var/tmp", fmt.Sprintf("kvagent-test-%d", os.Getpid()))
	defer os.Remove(path)
	out, code := kvagentOutput(t, "serve", "--socket-dir", filepath.Join(t.TempDir(), "s"), "--pool", "16MiB",
		"--dram-path", path)
	if code != exitFailed || !strings.Contains(out, "tmpfs") {
		t.Errorf("exit %d: %s", code, out)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("a file was not removed")
	}
}
