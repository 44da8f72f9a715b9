package arena

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// An agent of a release without a lock of its own signed the file as former does. While it lives,
// its file is no orphan; and to it, the file of an agent of this release is one that nobody signed.
func TestFileOfAFormerRelease(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-test-")
	if err != nil {
		t.Skipf("SKIPPED: no tmpfs on /dev/shm: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	o := &FileOptions{Path: filepath.Join(dir, "pool"), Bytes: 1 << 20, SlabBytes: 64 << 10, Now: time.Now()}
	open := func() (*File, *Arena) {
		f, a, err := OpenFile(o)
		if err != nil {
			t.Fatal(err)
		}
		return f, a
	}
	f, a := open()
	f.super.former.Store(77)
	fd, err := unix.Dup(f.fd) // with the lock that both releases have
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(a.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	var held *HeldError
	if _, _, err := OpenFile(o); !errors.As(err, &held) || held.Orphan || held.Process != 77 {
		t.Errorf("%v, want it in use by process 77", err)
	}
	_ = unix.Close(fd)
	f, a = open()
	if n, now := f.super.former.Load(), f.super.process.Load(); n != 0 || now != uint64(os.Getpid()) {
		t.Errorf("signed by %d for agents of that release, by %d for others", n, now)
	}
	if err := errors.Join(a.Close(), f.Close()); err != nil {
		t.Error(err)
	}
}
