package settings

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// The temporary directory is this user's own or refused; any other directory may be a link.
func TestSocketDirOfOthers(t *testing.T) {
	own, other := temporarySocketDir(), filepath.Join(t.TempDir(), "link")
	if _, err := os.Lstat(own); err == nil {
		t.Skipf("%s is in use", own)
	}
	t.Cleanup(func() { _ = os.Remove(own) })
	fill := func(dir string) error {
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		AddSocketDir(flags, new(string), "")
		return Fill(flags, func(name string) (string, bool) { return dir, name == "KVAGENT_SOCKET_DIR" })
	}
	refused := func(what string) {
		t.Helper()
		if err := fill(own); err == nil || !strings.Contains(err.Error(), "allowed: a directory of user") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := fill(own); err != nil {
		t.Errorf("a directory that is not there: %v", err)
	}
	for _, link := range []string{own, other} {
		if err := os.Symlink(t.TempDir(), link); err != nil {
			t.Fatal(err)
		}
	}
	refused("a link")
	if err := fill(other); err != nil {
		t.Errorf("a link elsewhere: %v", err)
	}
	if err := os.Remove(own); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(own, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := fill(own); err != nil {
		t.Errorf("a directory of this user: %v", err)
	}
	if os.Geteuid() != 0 {
		return // only root can give it away
	}
	if err := os.Chown(own, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	refused("a directory of another user")
}
