package socketdir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSocketDirectories(t *testing.T) {
	base := socketDir(t)
	make := func(name string, mode os.FileMode, files ...string) string {
		dir := filepath.Join(base, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if err := os.WriteFile(filepath.Join(dir, f), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	file := filepath.Join(base, "file")
	os.WriteFile(file, nil, 0o600)
	gid := os.Getegid()
	if gid == 0 {
		gid = 1 // root may give a directory to any group
	}
	for name, v := range map[string]struct {
		dir   string
		group int
		mode  os.FileMode // 0: refused
	}{
		"new":              {filepath.Join(base, "a", "b"), 0, 0o700},
		"new for a group":  {filepath.Join(base, "c"), gid, os.ModeSetgid | 0o770},
		"narrow":           {make("d", 0o700, "x"), 0, 0o700},
		"wide, empty":      {make("e", 0o755), 0, 0o700},
		"wide, own locks":  {make("f", 0o755, "session.sock.lock"), 0, 0o700},
		"wide, own log":    {make("i", 0o755, "agent.log", "start.lock"), 0, 0o700},
		"wide, others":     {make("g", 0o755, "letter"), 0, 0},
		"narrow for group": {make("h", 0o700), gid, os.ModeSetgid | 0o770},
		"a file":           {file, 0, 0},
	} {
		err := Prepare(v.dir, v.group)
		if v.mode == 0 {
			if err == nil {
				t.Errorf("%s: accepted", name)
			}
			continue
		}
		info, statErr := os.Stat(v.dir)
		if err != nil || statErr != nil {
			t.Errorf("%s: %v, %v", name, err, statErr)
			continue
		}
		if got := info.Mode() & (os.ModePerm | os.ModeSetgid); got != v.mode {
			t.Errorf("%s: mode %v, want %v", name, got, v.mode)
		}
	}
}

func TestSocketGroupMode(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to give a socket to a group")
	}
	path := filepath.Join(socketDir(t), "d", "s")
	l, err := Listen(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != sockModeGrp {
		t.Errorf("%v, %v, want mode %o", info, err, sockModeGrp)
	}
}

func TestSocketClaims(t *testing.T) {
	dir := socketDir(t)
	path := filepath.Join(dir, "s")
	first, err := Listen(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = Listen(path, 0); !errors.Is(err, ErrInUse) {
		t.Errorf("a held path: %v", err)
	}
	first.Close()
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err = Listen(path, 0); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a plain file: %v", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "precious" {
		t.Errorf("the file is %q now", b)
	}
	long := filepath.Join(dir, strings.Repeat("n", MaxPath))
	if _, err = Listen(long, 0); err == nil || !strings.Contains(err.Error(), "allowed is 1 to 107") {
		t.Errorf("a long path: %v", err)
	}
}

func TestCheckName(t *testing.T) {
	for _, name := range []string{"lookup_rpc_port_0_dp_rank0", "a", strings.Repeat("x", maxName)} {
		if err := CheckName(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"", "a\nb", "a\x7f", "\xff", ".", "..", "a/b", "../x", "x\x00", "session.sock",
		"lookup.sock", "admin.sock", "x.lock", strings.Repeat("x", maxName+1)} {
		if CheckName(name) == nil {
			t.Errorf("%q: accepted", name)
		}
	}
}

// A directory has one agent, by a lock that the next one finds.
func TestDirectoryLock(t *testing.T) {
	dir := socketDir(t)
	first, err := ListenAdmin(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = ListenAdmin(dir, 0)
	if want := fmt.Sprintf("by process %d", os.Getpid()); !errors.Is(err, ErrInUse) ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("a held directory: %v, want %q", err, want)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(LockPath(dir)); err != nil || string(text) != fmt.Sprintln(os.Getpid()) {
		t.Errorf("the lock holds %q, %v", text, err)
	}
	second, err := ListenAdmin(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	lock := second.Lock
	second.Lock = nil
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	if _, err := ListenAdmin(dir, 0); !errors.Is(err, ErrInUse) {
		t.Errorf("a directory whose lock was taken from its listener: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Error(err)
	}
	third, err := ListenAdmin(dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := third.Close(); err != nil {
		t.Error(err)
	}
}

// TestDirectoryRemovedInFlight removes a directory under a living listener. It expects a second
// listener there to keep its socket when the first one ends.
func TestDirectoryRemovedInFlight(t *testing.T) {
	dir := filepath.Join(socketDir(t), "d")
	path := filepath.Join(dir, "s.sock")
	listen := func() *Listener {
		l, err := Listen(path, 0)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	first := listen()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	second := listen()
	defer second.Close()
	if first.Reachable() || !second.Reachable() {
		t.Errorf("reachable: %v, which was removed, and %v", first.Reachable(), second.Reachable())
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if !alive(path) {
		t.Error("the end of the first listener removed the socket of the second")
	}
}

func TestListenerAfterKill(t *testing.T) {
	dir := socketDir(t)
	path := filepath.Join(dir, Session)
	l, err := Listen(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	l.UnixListener.Close() // as a killed process leaves it: the socket's file is there
	again, err := Listen(path, 0)
	if err != nil {
		t.Fatalf("a stale file: %v", err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
	if all, _ := os.ReadDir(dir); len(all) != 0 {
		t.Errorf("leftovers: %v", all)
	}
}

func socketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
