// Package socketdir is the directory of the agent's Unix sockets: who may reach them, and which
// process serves one.
package socketdir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// MaxPath bounds the path of a socket, bytes: the kernel does.
const MaxPath = 107

const maxName = 128 // bytes of a look-up socket's name

// The permissions of their directory guard the sockets: ZeroMQ asks for no credentials.
const (
	dirMode      = 0o700
	dirModeGroup = 0o2770
	sockMode     = 0o600
	sockModeGrp  = 0o660
)

// Prepare creates dir for sockets, or checks an existing one: owned by this user or root, and
// closed to all others except the group (a gid; 0: none). A wider directory of this user is
// narrowed if it holds only sockets and their lock files.
func Prepare(dir string, group int) error {
	err := os.Mkdir(dir, dirMode)
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.MkdirAll(filepath.Dir(dir), 0o755); err == nil {
			err = os.Mkdir(dir, dirMode)
		}
	}
	made := err == nil
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("socket directory: %w", err)
	}
	return narrowDir(dir, group, made)
}

func narrowDir(dir string, group int, made bool) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return fmt.Errorf("socket directory %s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fmt.Errorf("socket directory %s: not a directory", dir)
	}
	if st.Uid != uint32(os.Geteuid()) && st.Uid != 0 {
		return fmt.Errorf("socket directory %s: owned by uid %d, allowed is %d or 0", dir, st.Uid, os.Geteuid())
	}
	want := uint32(dirMode)
	if group != 0 {
		want = dirModeGroup
	}
	mode := st.Mode & 0o7777
	if mode == want && (group == 0 || int(st.Gid) == group) {
		return nil
	}
	if !made && mode&0o77&^want != 0 && !onlySockets(dir) {
		return fmt.Errorf("socket directory %s: mode %04o and other files in it, allowed is %04o: "+
			"give it a directory of its own", dir, mode, want)
	}
	if group != 0 {
		if err := os.Chown(dir, -1, group); err != nil {
			return fmt.Errorf("socket directory: %w", err)
		}
	}
	if err := unix.Chmod(dir, want); err != nil {
		return fmt.Errorf("socket directory %s: mode %04o, allowed is %04o: %w", dir, mode, want, err)
	}
	return nil
}

func onlySockets(dir string) bool {
	all, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, e := range all {
		if e.Type()&fs.ModeSocket == 0 && !strings.HasSuffix(e.Name(), lockSuffix) && e.Name() != MoversFile &&
			e.Name() != logFile {
			return false
		}
	}
	return true
}

// CheckName returns an error unless name can be a look-up socket's: a file of the socket directory
// that the agent does not use itself.
func CheckName(name string) error {
	switch {
	case name == "" || len(name) > maxName:
		return fmt.Errorf("lookup_name: %d bytes, allowed is 1 to %d", len(name), maxName)
	case strings.HasPrefix(name, ".") || strings.ContainsAny(name, "/\x00"):
		return fmt.Errorf("lookup_name: %q, allowed is the name of a file without a leading dot", name)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("lookup_name: %q, allowed is UTF-8 without control characters", name)
	case strings.HasSuffix(name, lockSuffix) || name == Session || name == Admin || name == Lookup:
		return fmt.Errorf("lookup_name: %q is taken by the agent", name)
	}
	return nil
}

// The agent's own sockets in its directory.
const (
	Session = "session.sock"
	Admin   = "admin.sock"
	Lookup  = "lookup.sock"
)

// MoversFile is the file in the socket directory in which an agent records its movers for its
// successor. No look-up socket can have the name.
const MoversFile = ".movers"

// logFile is the log of an agent that an engine has started (python/kvagent/starter.py).
const logFile = "agent.log"

// alive reports whether a process accepts connections at path.
func alive(path string) bool {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return true // unknown: treat it as alive
	}
	defer unix.Close(fd)
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
	return !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ENOENT)
}
