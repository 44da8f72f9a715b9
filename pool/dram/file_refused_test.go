package dram

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool/dram/arena"
)

// TestColdStarts lists what makes the content of a file unusable.
func TestColdStarts(t *testing.T) {
	for name, c := range map[string]struct {
		change func(o *Options, b []byte) // of the options, and of the superblock
		why    string
	}{
		"other size":     {func(o *Options, _ []byte) { o.Bytes *= 2 }, "its arena has"},
		"other slabs":    {func(o *Options, _ []byte) { o.SlabBytes *= 2 }, "in slabs of"},
		"unknown format": {func(_ *Options, b []byte) { b[8] = 9 }, "its format is 9, known is 5"},
		"damaged":        {func(_ *Options, b []byte) { b[33] ^= 1 }, "superblock is damaged"},
		"made in part":   {func(_ *Options, b []byte) { b[8] = 0 }, "was not finished"},
	} {
		o, h := keptFile(t)
		changeFile(t, o, func(b []byte, l *arena.Layout) {
			c.change(&o, b[l.Super:])
		})
		p := reopen(t, o)
		if r := p.Info().Recovery; !strings.Contains(r.Cold, c.why) || r.Entries != 0 {
			t.Errorf("%s: %+v, want %q", name, r, c.why)
		}
		id := openSpec(t, p, keptSpec)
		if n := p.Prefix(id, 0, h); n != 0 {
			t.Errorf("%s: %d blocks", name, n)
		}
		put(t, p, id, h)
		closePool(t, p)
		p = reopen(t, o)
		if r := p.Info().Recovery; r.Cold != "" || r.Entries != 40 {
			t.Errorf("%s, and again: %+v", name, r)
		}
		closePool(t, p)
	}
}

// changeFile changes the bytes of a file that is not open.
func changeFile(t *testing.T, o Options, change func(b []byte, l *arena.Layout)) {
	t.Helper()
	b, err := os.ReadFile(o.Path)
	if err != nil {
		t.Fatal(err)
	}
	l := arena.LayoutOf(o.Bytes, o.SlabBytes, arena.PageBytes)
	change(b, &l)
	if err := os.WriteFile(o.Path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDamagedHeadersAreFreeSlots(t *testing.T) {
	o, h := keptFile(t)
	changeFile(t, o, func(b []byte, l *arena.Layout) {
		for i := range 40 {
			if i%2 == 1 {
				b[l.Headers+int64(i)*arena.HeaderBytes+int64(i)] ^= 0x40
			}
		}
	})
	p := reopen(t, o)
	id := openSpec(t, p, keptSpec)
	if r := p.Info().Recovery; r.Damaged != 20 || r.Entries != 20 {
		t.Errorf("%+v, want 20 damaged of 40", r)
	}
	put(t, p, id, h)
	if n := p.Prefix(id, 0, h); n != 40 {
		t.Errorf("%d of 40 blocks after they were stored again", n)
	}
	closePool(t, p)
}

// TestFilesThatAreRefused checks that foreign files are not touched.
func TestFilesThatAreRefused(t *testing.T) {
	o := Options{Bytes: 64 << 10, SlabBytes: 16 << 10, Path: shmPath(t)}
	for name, c := range map[string]struct {
		make func() error
		why  string
	}{
		"foreign": {func() error {
			return os.WriteFile(
				o.Path, []byte(strings.Repeat("notes\n", 2000)), 0o600,
			)
		}, "no pool's"},
		"foreign and empty": {func() error { return os.WriteFile(o.Path, make([]byte, 64<<10), 0o600) }, "no pool's"},
		"open to others": {func() error {
			return errors.Join(
				os.WriteFile(o.Path, nil, 0o600), os.Chmod(o.Path, 0o644),
			)
		}, "mode 0644"},
		"link":         {func() error { return os.Symlink("/etc/hostname", o.Path) }, "symbolic link"},
		"directory":    {func() error { return os.Mkdir(o.Path, 0o700) }, "directory"},
		"no directory": {func() error { o.Path += "/x/y"; return nil }, "not there"},
	} {
		path := o.Path
		if err := c.make(); err != nil {
			t.Fatal(err)
		}
		before, _ := os.ReadFile(path)
		if _, err := Open(o); err == nil || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, want %q", name, err, c.why)
		}
		if after, _ := os.ReadFile(path); string(after) != string(before) {
			t.Errorf("%s: it was changed", name)
		}
		o.Path = path
		os.RemoveAll(path)
	}
}

func TestSecondPoolIsRefused(t *testing.T) {
	o, _ := keptFile(t)
	p := reopen(t, o)
	var held *HeldError
	if _, err := Open(o); !errors.As(err, &held) || held.Process != os.Getpid() || held.Orphan {
		t.Errorf("%v", err)
	}
	closePool(t, p)
}

// TestNoRoomIsSaid checks that the error for a file system that is too small names both sizes.
func TestNoRoomIsSaid(t *testing.T) {
	var fs unix.Statfs_t
	path := shmPath(t)
	if err := unix.Statfs(filepath.Dir(path), &fs); err != nil {
		t.Fatal(err)
	}
	_, err := Open(Options{Bytes: 1 << 40, Path: path})
	if err == nil || !strings.Contains(err.Error(), "GiB") {
		t.Errorf("%v", err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("a file was left over")
	}
}
