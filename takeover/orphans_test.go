package takeover

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/dram"
)

// An agent that has stopped its record leaves alone what its successor writes.
func TestStoppedRecordIsTheSuccessors(t *testing.T) {
	dir := t.TempDir()
	first := NewRecord(dir, nil, zap.NewNop())
	first.Update(77, true)
	first.Stop()
	second := NewRecord(dir, nil, zap.NewNop())
	second.Update(78, true)
	first.Update(77, false)
	if f, err := ReadMovers(dir); err != nil || len(f.Movers) != 1 || f.Movers[0].PID != 78 {
		t.Errorf("recorded %+v, %v", f, err)
	}
}

// startSleeper starts a process that looks like a mover of an agent that has ended.
func startSleeper(t *testing.T) (*exec.Cmd, Mover) {
	t.Helper()
	cmd := exec.Command("cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() }) // one may have ended
	// Once it answers it has its environment: Start returns while it is still being set up.
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return cmd, Mover{Process{cmd.Process.Pid, dram.ProcessBegan(cmd.Process.Pid)}, Process{1, 1}}
}

// Nothing but the very process that was written down is killed.
func TestOnlyTheRecordedProcessIsEnded(t *testing.T) {
	l := &Orphans{log: zap.NewNop()}
	_, m := startSleeper(t)
	for name, change := range map[string]func(*Mover){
		"began":    func(m *Mover) { m.Began++ },
		"no begin": func(m *Mover) { m.Began = 0 },
		"self":     func(m *Mover) { m.PID, m.Began = os.Getpid(), dram.ProcessBegan(os.Getpid()) },
		"init":     func(m *Mover) { m.PID, m.Began = 1, dram.ProcessBegan(1) },
	} {
		other := m
		change(&other)
		if fd, err := l.strike(other); err == nil {
			t.Errorf("%s: another process was killed", name)
			_ = unix.Close(fd)
		}
	}
	fd, err := l.strike(m)
	if err != nil || !ended(fd, 20*time.Second) {
		t.Errorf("the recorded process was not ended: %v", err)
	}
	_ = unix.Close(fd)
	if _, err := l.strike(m); !errors.Is(err, unix.ESRCH) && !ended(fd, 0) {
		t.Errorf("a process that has ended: %v", err)
	}
}

// A process that may be a mover, and could not be killed, holds the pool's file while it is
// there: the file is waited for, because the process may end by itself, and then abandoned.
func TestMoverThatIsLeftAlone(t *testing.T) {
	kill := func(pidfd int) error { return unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) }
	for name, c := range map[string]struct {
		change func(*Mover)
		kill   func(int) error
		held   bool
	}{
		"no begin": {func(m *Mover) { m.Began = 0 }, kill, true},
		"no right": {func(*Mover) {}, func(int) error { return unix.EPERM }, true},
		"killed":   {func(*Mover) {}, kill, false},
		"replaced": {func(m *Mover) { m.Began++ }, kill, false},
		"init":     {func(m *Mover) { m.PID, m.Began = 1, dram.ProcessBegan(1) }, kill, false},
	} {
		t.Run(name, func(t *testing.T) {
			cmd, m := startSleeper(t)
			c.change(&m)
			dir := t.TempDir()
			text, err := json.Marshal(File{machineID(), namespaceID(), []Mover{m}})
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, socketdir.MoversFile), text, 0o600); err != nil {
				t.Fatal(err)
			}
			l := &Orphans{log: zap.NewNop(), kill: c.kill}
			l.End(t.Context(), dir)
			by := &dram.HeldError{Process: m.Agent.PID, Began: m.Agent.Began}
			if held := l.holds(by); held != c.held || len(l.Running()) > 0 != c.held {
				t.Errorf("held %v, left %+v, want held %v", held, l.Running(), c.held)
			}
			_ = cmd.Process.Kill() // it may have ended
			_ = cmd.Wait()         // it was killed
			if l.holds(by) {
				t.Error("a process that has ended holds the file")
			}
		})
	}
	// Without a descriptor of it, where the kernel or a filter refuses one, its number says the
	// same.
	cmd, m := startSleeper(t)
	left := orphan{Mover: m, pidfd: -1}
	if left.hasEnded() {
		t.Error("a process that runs is over")
	}
	other := left
	if other.Began++; !other.hasEnded() {
		t.Error("a process whose number another one has is there")
	}
	_ = cmd.Process.Kill() // of the children of this test
	_ = cmd.Wait()         // it was killed
	if !left.hasEnded() {
		t.Error("a process that has ended is there")
	}
}

// An abandoned file loses its name and nothing else: a process that has it open may still use it.
func TestGivenUpFileKeepsItsMemory(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	if err := os.WriteFile(path, []byte("blocks"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	l := &Orphans{log: zap.NewNop()}
	if err := l.abandonFile(path, errors.New("held")); err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(file)
	if err != nil || string(text) != "blocks" || l.Status().Cold != "held" {
		t.Errorf("%q, %v, cold %q", text, err, l.Status().Cold)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the name is there: %v", err)
	}
}

// A file of movers that others could have written, or that is none, ends no process.
func TestMoversFileOfOthers(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, socketdir.MoversFile)
	if f, err := ReadMovers(dir); err != nil || len(f.Movers) != 0 {
		t.Errorf("no file: %+v, %v", f, err)
	}
	for name, make := range map[string]func() error{
		"writable by others": func() error {
			return errors.Join(os.WriteFile(path, []byte("{}"), 0o600), os.Chmod(path,
				0o666))
		},
		"a link":  func() error { return os.Symlink("/etc/hostname", path) },
		"a pipe":  func() error { return unix.Mkfifo(path, 0o600) },
		"no JSON": func() error { return os.WriteFile(path, []byte("x"), 0o600) },
		"a socket": func() error {
			l, err := net.Listen("unix", path)
			if err == nil {
				l.(*net.UnixListener).SetUnlinkOnClose(false)
				err = l.Close()
			}
			return err
		},
	} {
		_ = os.Remove(path) // there may be none
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if f, err := ReadMovers(dir); err == nil {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// The group of the socket directory can write in it. A file that it plants under the name of the
// next list of movers is neither written to, nor read, nor waited for.
func TestPlantedMoversFile(t *testing.T) {
	for name, plant := range map[string]func(next, other string) error{
		"nothing":      func(string, string) error { return nil },
		"a link":       func(next, other string) error { return os.Symlink(other, next) },
		"another name": func(next, other string) error { return os.Link(other, next) },
		"a pipe":       func(next, _ string) error { return unix.Mkfifo(next, 0o666) },
		"a file of others": func(next, _ string) error {
			return errors.Join(os.WriteFile(next, nil, 0o600), os.Chmod(next, 0o666))
		},
		"a directory": func(next, _ string) error { return os.Mkdir(next, 0o777) },
	} {
		t.Run(name, func(t *testing.T) {
			dir, other := t.TempDir(), filepath.Join(t.TempDir(), "other")
			next := filepath.Join(dir, socketdir.MoversFile+".lock")
			if err := errors.Join(os.WriteFile(other, []byte("kept"), 0o600), plant(next, other)); err != nil {
				t.Fatal(err)
			}
			r := NewRecord(dir, nil, zap.NewNop())
			noted := make(chan struct{})
			go func() { r.Update(77, true); close(noted) }()
			select {
			case <-noted:
			case <-time.After(20 * time.Second):
				fd, err := unix.Open(next, unix.O_RDONLY|unix.O_NONBLOCK, 0) // lets the writer go on
				if err == nil {
					_ = unix.Close(fd)
				}
				t.Fatal("the record waits for what was planted")
			}
			if text, err := os.ReadFile(other); err != nil || string(text) != "kept" {
				t.Errorf("another file was written to: %q, %v", text, err)
			}
			if f, err := ReadMovers(dir); err != nil || len(f.Movers) != 1 || f.Movers[0].PID != 77 {
				t.Errorf("recorded %+v, %v", f, err)
			}
		})
	}
}

// The holder of the pool's file is an orphan only if the signer is an agent whose movers are
// orphans, whatever that agent's host was called: with hostPID the next pod sees the same
// processes.
func TestWhoHoldsThePool(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	old := Process{77, 5}
	by := dram.HeldError{Process: old.PID, Began: old.Began, Host: host}
	runs, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(runs)
	stuck := &Orphans{agents: []Process{old}}
	stuck.mu.running = []orphan{{Mover: Mover{Agent: old}, pidfd: runs}}
	for name, c := range map[string]struct {
		left *Orphans
		by   dram.HeldError
		held bool
	}{
		"stuck":           {stuck, by, true},
		"ended":           {&Orphans{agents: []Process{old}}, by, false},
		"unseen":          {&Orphans{agents: []Process{old}, unseen: true}, by, true},
		"another process": {stuck, dram.HeldError{Process: 78, Began: 5, Host: host}, false},
		"another start":   {stuck, dram.HeldError{Process: 77, Began: 6, Host: host}, false},
		"another pod":     {stuck, dram.HeldError{Process: 77, Began: 5, Host: "x" + host}, true},
		"not signed":      {stuck, dram.HeldError{}, false},
	} {
		if held := c.left.holds(&c.by); held != c.held {
			t.Errorf("%s: held %v", name, held)
		}
	}
}
