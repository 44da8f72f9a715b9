package secret

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestFilesAreBounded: a file without an end costs neither memory nor the process, whatever it is
// read for.
func TestFilesAreBounded(t *testing.T) {
	const endless = "/dev/zero"
	_, text := Read(endless)
	_, authorities := Authorities(endless)
	_, pair := Pair(endless, endless)
	_, none := Read(filepath.Join(t.TempDir(), "none"))
	for says, err := range map[string]error{
		"more than 1048576 bytes":                        text,
		"authorities /dev/zero: more than 1048576 bytes": authorities,
		"certificate /dev/zero: more than 1048576 bytes": pair,
		"no such file": none,
	} {
		if err == nil || !strings.HasPrefix(err.Error(), says) {
			t.Errorf("%v, not %q", err, says)
		}
	}
	if _, err := ReadPrivate(endless); err == nil || !strings.Contains(err.Error(), "a regular file") {
		t.Errorf("a device: %v", err)
	}
}

// ofGroup is a file of another group.
type ofGroup struct {
	os.FileInfo
	group uint32
}

func (f ofGroup) Sys() any { return &syscall.Stat_t{Gid: f.group} }

// TestFileOfAGroup: a file that its group may read is taken only of a group of this process.
func TestFileOfAGroup(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, make([]byte, 32), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		mode   os.FileMode
		groups []int
		says   string
	}{
		{0o440, []int{1, 42}, ""}, {0o640, []int{42}, ""}, {0o400, nil, ""}, {0o600, []int{1}, ""},
		{0o440, []int{1, 41}, "of group 42"}, {0o640, nil, "of group 42"}, {0o660, []int{42}, "mode 0600"},
		{0o444, []int{42}, "mode 0600"},
	} {
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		err = private(ofGroup{info, 42}, c.groups)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("mode %v, groups %v: %v, not %q", c.mode, c.groups, err, c.says)
		}
	}
}
