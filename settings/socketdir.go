package settings

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// The Python package has the same rules (python/kvagent/socketdir.py).

const (
	systemSocketDir = "/run/kvagent"
	// maxSocketDir is in bytes: the kernel allows 107 for the path of a socket, such as
	// session.sock in the directory.
	maxSocketDir = 107 - len("/session.sock")
)

// DefaultSocketDir returns the directory that the agent and its clients use if none is named:
// /run/kvagent if it exists or this user is root, else kvagent in XDG_RUNTIME_DIR, else
// /tmp/kvagent-UID.
func DefaultSocketDir() string {
	if _, err := os.Stat(systemSocketDir); err == nil || os.Geteuid() == 0 {
		return systemSocketDir
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "kvagent")
	}
	return temporarySocketDir()
}

// temporarySocketDir lies where every user may create files.
func temporarySocketDir() string { return "/tmp/kvagent-" + strconv.Itoa(os.Geteuid()) }

// AddSocketDir defines --socket-dir, which Fill checks; dir has the default.
func AddSocketDir(f *pflag.FlagSet, dir *string, usage string) {
	f.Var((*socketDirValue)(dir), "socket-dir", usage)
}

type socketDirValue string

func (v *socketDirValue) Set(text string) error {
	*v = socketDirValue(text)
	return nil
}

func (v *socketDirValue) Type() string   { return "string" }
func (v *socketDirValue) String() string { return string(*v) }

// check refuses a directory in which no socket can be, and a temporary one that another user made,
// or a link, which would lead to a place that another user chose.
func (v *socketDirValue) check() error {
	if *v == "" {
		return fmt.Errorf(`socket-dir: "", allowed: a directory`)
	}
	dir, err := filepath.Abs(string(*v))
	if err != nil {
		return fmt.Errorf("socket-dir: %w", err)
	}
	if len(dir) > maxSocketDir {
		return fmt.Errorf("socket-dir: %q, %d bytes, allowed: 1 to %d", dir, len(dir), maxSocketDir)
	}
	var st unix.Stat_t
	if dir != temporarySocketDir() || errors.Is(unix.Lstat(dir, &st), unix.ENOENT) {
		return nil
	}
	if uid := os.Geteuid(); st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != uid {
		return fmt.Errorf("socket-dir: %q, a link or of user %d, allowed: a directory of user %d", dir, st.Uid, uid)
	}
	return nil
}
