package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// mockRun is what became of a run of mock.
type mockRun struct {
	Loaded int `json:"blocks_loaded"`
	Saved  int `json:"blocks_saved"`
	Wrong  int `json:"wrong_bytes"`
	Late   int `json:"loads_late"`
}

// replayMock runs the same requests each time. All must end, with right bytes.
func replayMock(t *testing.T, dir string) (r mockRun) {
	t.Helper()
	r, err := mockAgain(t, dir)
	if err != nil || r.Wrong != 0 || r.Late != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	return r
}

// mockAgain runs the same requests each time. An error has what mock said.
func mockAgain(t *testing.T, dir string) (r mockRun, err error) {
	t.Helper()
	var log bytes.Buffer
	cmd := kvagentCommand(t, "mock", "--socket-dir", dir, "--lookup-timeout", "10s", "--requests", "40",
		"--block-bytes", "4096")
	cmd.Stderr = &log
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("mock: %w\n%s", err, &log)
	}
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	left := struct{ Stats *mockRun }{&r}
	if bad := json.Unmarshal(lines[len(lines)-1], &left); bad != nil {
		t.Fatalf("mock: %v\n%s", bad, out)
	}
	return r, err
}

// TestMockFindsAFlippedBit expects an engine to find a bit that flipped in the pool, and with
// integrity full to compute the block.
func TestMockFindsAFlippedBit(t *testing.T) {
	for _, integrity := range []string{"header", "full"} {
		path := poolFile(t)
		_, dir, _ := startServe(t, "--dram-path", path, "--integrity", integrity)
		replayMock(t, dir)
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		const at = 20*4096 + 2048 // blocks of 4 KiB lie one after the other from the first on
		var b [1]byte
		_, err = f.ReadAt(b[:], at)
		b[0] ^= 1
		_, bad := f.WriteAt(b[:], at)
		if err = errors.Join(err, bad, f.Close()); err != nil {
			t.Fatal(err)
		}
		r, err := mockAgain(t, dir)
		if integrity == "header" && (r.Wrong == 0 || err == nil || !strings.Contains(err.Error(), "wrong bytes")) {
			t.Errorf("integrity header: %+v, %v; want wrong bytes", r, err)
		}
		if integrity == "full" && (r.Saved != 1 || err != nil) {
			t.Errorf("integrity full: %+v, %v; want one block saved again", r, err)
		}
	}
}

// killed ends an agent, which must live until then.
func killed(t *testing.T, cmd *exec.Cmd, log *processLog) {
	t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	err := cmd.Wait()
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the agent had ended: %v\n%s", err, log)
	}
	if strings.Contains(log.String(), "SIGBUS") {
		t.Fatalf("it met a fault:\n%s", log)
	}
}

// TestAgentWhoseFileIsCut cuts most pages off the file of a serving agent, and makes it as long as
// before later. It expects the agent to serve the remaining blocks, the next one to begin cold, and
// the one after that to be warm.
func TestAgentWhoseFileIsCut(t *testing.T) {
	for _, device := range []string{"host", "host-mover"} {
		t.Run(device, func(t *testing.T) {
			path := poolFile(t)
			args := []string{"--dram-path", path, "--device", device}
			cmd, dir, log := startServe(t, args...)
			first := replayMock(t, dir)
			before, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(path, 128<<10); err != nil {
				t.Fatal(err)
			}
			if r := replayMock(t, dir); r.Loaded == 0 {
				t.Errorf("%+v: some blocks are left", r)
			}
			if statusOf(t, dir).Pool.Bad.Pages == 0 {
				t.Error("no page is bad")
			}
			_, err = adminclient.New(dir).Get(t.Context(), "/readyz")
			if err == nil || !strings.Contains(err.Error(), "cannot be read") {
				t.Errorf("readyz of an agent without a pool: %v", err)
			}
			out, code := kvagentOutput(t, "status", "--socket-dir", dir)
			if code != 0 || !strings.Contains(out, "BAD PAGES") {
				t.Errorf("status: %d %s", code, out)
			}
			if err := os.Truncate(path, before.Size()); err != nil {
				t.Fatal(err)
			}
			replayMock(t, dir)
			killed(t, cmd, log)

			cmd, dir, log = startServe(t, args...)
			if !strings.Contains(log.String(), "the pool starts empty") {
				t.Errorf("the next agent did not begin cold:\n%s", log)
			}
			if r := replayMock(t, dir); r.Saved < first.Saved/2 {
				t.Errorf("%+v in a new file, %+v at first", r, first)
			}
			killed(t, cmd, log)

			cmd, dir, log = startServe(t, args...)
			if r := replayMock(t, dir); r.Loaded < first.Saved/2 || r.Saved > first.Saved/2 {
				t.Errorf("%+v with a warm file, %+v at first", r, first)
			}
			killed(t, cmd, log)
		})
	}
}

// provideHeaders gives memory to the headers of all slots of a pool of 16 MiB.
func provideHeaders(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 16<<20, 1<<20); err != nil {
		t.Fatal(err)
	}
}

// TestAgentMeetsABadPage makes single pages of a warm file bad, in blocks and in their headers,
// while an agent serves and before one starts. It expects each to cost only the blocks in it.
func TestAgentMeetsABadPage(t *testing.T) {
	for _, device := range []string{"host", "host-mover"} {
		t.Run(device, func(t *testing.T) {
			root := t.TempDir()
			mount := exec.Command("mount", "-t", "tmpfs", "-o", "size=40m,mode=0700", "none", root)
			if out, err := mount.CombinedOutput(); err != nil {
				t.Skipf("SKIPPED: mounting a tmpfs needs root: %v: %s", err, out)
			}
			t.Cleanup(func() { _ = unix.Unmount(root, unix.MNT_DETACH) })
			path := filepath.Join(root, "pool")
			args := []string{"--dram-path", path, "--device", device}
			cmd, dir, log := startServe(t, args...)
			first := replayMock(t, dir)
			provideHeaders(t, path)         // the pages to be taken are all that a full file system lacks
			takePage(t, path, 20*4096, "a") // blocks of 4 KiB lie one after the other from the first on
			second := replayMock(t, dir)
			if second.Saved != 1 || second.Loaded == 0 {
				t.Errorf("%+v when one page went bad, want one block saved again", second)
			}
			third := replayMock(t, dir)
			if third.Saved != 0 {
				t.Errorf("%+v afterwards", third)
			}
			if b := statusOf(t, dir).Pool.Bad; b.Pages != 1 || b.Bytes != 1<<20 || b.Dropped != 1 {
				t.Errorf("status %+v", b)
			}
			if !strings.Contains(log.String(), "a page of the pool cannot be read") {
				t.Errorf("nothing in the log:\n%s", log)
			}
			killed(t, cmd, log)

			takePage(t, path, 30*4096, "b")
			for range 2 {
				cmd, dir, log = startServe(t, args...)
				pooltest.Until(t, "two bad pages", func() bool { return statusOf(t, dir).Pool.Bad.Pages == 2 })
				r := replayMock(t, dir)
				if r.Loaded == 0 || r.Saved > 1 {
					t.Errorf("%+v after a start with two bad pages, %+v at first", r, first)
				}
				killed(t, cmd, log)
			}
			takePage(t, path, 16<<20, "c") // headers, of the first 64 slots
			cmd, dir, log = startServe(t, args...)
			r := replayMock(t, dir)
			if r.Loaded == 0 || r.Saved == 0 || r.Saved > 64 {
				t.Errorf("%+v after a start without a page of headers\n%s", r, log)
			}
			if b := statusOf(t, dir).Pool.Bad; b.Pages != 2 || b.Faults == 0 {
				t.Errorf("status %+v", b)
			}
			if strings.Contains(log.String(), "starts empty") {
				t.Errorf("it began cold:\n%s", log)
			}
			killed(t, cmd, log)
		})
	}
}

// takePage takes a page away from a file on a tmpfs that has no other one to give.
func takePage(t *testing.T, path string, off int64, name string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, 4096); err != nil {
		t.Fatal(err)
	}
	rest, err := os.Create(filepath.Join(filepath.Dir(path), "rest-"+name))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rest.Close() }()
	for b := make([]byte, 4096); err == nil; {
		_, err = rest.Write(b)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}
