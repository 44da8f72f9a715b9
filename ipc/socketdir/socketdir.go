// Package socketdir is the directory of the agent's Unix sockets: who may reach them, and which
// process serves one.
package socketdir

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
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
		if e.Type()&fs.ModeSocket == 0 && !strings.HasSuffix(e.Name(), lockSuffix) && e.Name() != logFile {
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

// logFile is the log of an agent that an engine has started (python/kvagent/starter.py).
const logFile = "agent.log"

// alive reports whether a process accepts connections at path; true also if that is not known.
func alive(path string) bool {
	c, err := net.DialTimeout("unix", path, aliveWait)
	if err == nil {
		_ = c.Close() // nothing was written
	}
	return !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.ENOENT)
}

// aliveWait is how long a full queue of connections may take.
const aliveWait = 100 * time.Millisecond

// ErrInUse is wrapped by the error of a listener whose socket another process serves.
var ErrInUse = errors.New("in use")

// ErrForeign is wrapped by the error of a listener whose path is a file of another kind.
var ErrForeign = errors.New("not touched")

const lockSuffix = ".lock"

// clear removes the socket of a dead process.
func clear(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket == 0 {
		return fmt.Errorf("socket %s: a file that is no socket is there: %w", path, ErrForeign)
	}
	if alive(path) {
		return fmt.Errorf("socket %s: %w by another process", path, ErrInUse)
	}
	return os.Remove(path)
}

func openTo(path string, group int) error {
	if group == 0 {
		return os.Chmod(path, sockMode)
	}
	if err := os.Chown(path, -1, group); err != nil {
		return err
	}
	return os.Chmod(path, sockModeGrp)
}

// Listener is a Unix stream listener.
type Listener struct {
	*net.UnixListener
	path  string
	bound fs.FileInfo // of the socket's file
	Lock  *os.File    // of the directory, closed by Close; nil if the listener does not hold it
}

// ListenAdmin takes a socket directory, which only one agent at a time can have, by a lock that
// stays in it. If another has it the error wraps ErrInUse and names its process.
func ListenAdmin(dir string, group int) (*Listener, error) {
	lock, err := lockDir(dir, group)
	if err != nil {
		return nil, fmt.Errorf("socket-dir: %w", err)
	}
	l, err := Listen(filepath.Join(dir, Admin), group)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("socket-dir: %w", err)
	}
	l.Lock = lock
	return l, nil
}

// lockDir locks a directory, and signs the lock with this process's pid.
func lockDir(dir string, group int) (*os.File, error) {
	if err := Prepare(dir, group); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(LockPath(dir), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, sockMode)
	if err != nil {
		return nil, fmt.Errorf("socket lock: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		if err = f.Truncate(0); err == nil {
			_, err = fmt.Fprintf(f, "%d\n", os.Getpid())
		}
		if err == nil {
			return f, nil
		}
	}
	defer f.Close()
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("socket lock %s: %w", f.Name(), err)
	}
	var pid int
	_, _ = fmt.Fscan(f, &pid) // it is for the message
	return nil, fmt.Errorf("%s: %w by process %d", dir, ErrInUse, pid)
}

// LockPath returns the lock file of a directory, with the pid of the process that locked it last.
func LockPath(dir string) string { return filepath.Join(dir, Admin+lockSuffix) }

// Listen listens at path as all sockets of the agent do: in a directory that is closed to others,
// replacing a dead socket but never a live one. group is a gid, 0 for none. The caller has the
// directory.
func Listen(path string, group int) (*Listener, error) {
	if len(path) > MaxPath {
		return nil, fmt.Errorf("socket path %s: %d bytes, allowed is 1 to %d", path, len(path), MaxPath)
	}
	if err := Prepare(filepath.Dir(path), group); err != nil {
		return nil, err
	}
	if err := clear(path); err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	err = openTo(path, group)
	out := &Listener{UnixListener: l, path: path}
	if err == nil {
		out.bound, err = os.Lstat(path) // it may have been removed already
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", path, err), l.Close())
	}
	l.SetUnlinkOnClose(false) // Close removes the file, if it still is this one
	return out, nil
}

// Reachable reports whether the socket's file still exists and is the one that was bound.
func (l *Listener) Reachable() bool {
	now, err := os.Lstat(l.path)
	return err == nil && os.SameFile(now, l.bound)
}

// Close stops listening and removes the socket's file, unless others replaced it after the
// directory was removed.
func (l *Listener) Close() error {
	err := l.UnixListener.Close()
	if err != nil {
		return err
	}
	if l.Reachable() {
		os.Remove(l.path)
	}
	if l.Lock != nil {
		l.Lock.Close()
	}
	return nil
}
