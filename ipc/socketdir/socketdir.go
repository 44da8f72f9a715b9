// Package socketdir is the directory of the agent's Unix sockets: who may reach them, and which
// process serves one.
package socketdir

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
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

// ErrInUse is wrapped by the error of a listener whose socket another process serves.
var ErrInUse = errors.New("in use")

// ErrForeign is wrapped by the error of a listener whose path is a file of another kind.
var ErrForeign = errors.New("not touched")

const (
	lockSuffix  = ".lock"
	lockTries   = 16  // the holder may remove a lock file when it releases it
	listenQueue = 512 // connections not yet accepted

	// maxSignature is the size in bytes of a holder's signature: its pid and a newline.
	maxSignature = 11
)

// socketFile is a socket file that this process holds a lock for, so that no other agent replaces
// it.
type socketFile struct {
	path  string
	lock  *os.File
	bound fs.FileInfo // of the socket's file
}

// claimSocket locks path and binds a listening Unix socket there. It sets the mode before any
// client can connect. The caller owns fd.
func claimSocket(path string, group int) (s *socketFile, fd int, err error) {
	if len(path) > MaxPath {
		return nil, -1, fmt.Errorf("socket path %s: %d bytes, allowed is 1 to %d", path, len(path), MaxPath)
	}
	if err := Prepare(filepath.Dir(path), group); err != nil {
		return nil, -1, err
	}
	lock, err := lockFile(path)
	if err != nil {
		return nil, -1, err
	}
	s = &socketFile{path: path, lock: lock}
	if err = s.clear(); err == nil {
		fd, err = bindSocket(path, group)
	}
	if err != nil {
		s.unlock()
		return nil, -1, err
	}
	if s.bound, err = os.Lstat(path); err != nil { // removed already
		s.unlock()
		unix.Close(fd)
		return nil, -1, fmt.Errorf("socket %s: %w", path, err)
	}
	return s, fd, nil
}

// clear removes the socket of a dead process.
func (s *socketFile) clear() error {
	info, err := os.Lstat(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket == 0 {
		return fmt.Errorf("socket %s: a file that is no socket is there: %w", s.path, ErrForeign)
	}
	if alive(s.path) {
		return fmt.Errorf("socket %s: %w by a process that does not lock it", s.path, ErrInUse)
	}
	return os.Remove(s.path)
}

func bindSocket(path string, group int) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("socket %s: %w", path, err)
	}
	if err = unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err == nil {
		if err = openTo(path, group); err == nil {
			err = unix.Listen(fd, listenQueue)
		}
		if err != nil {
			os.Remove(path)
		}
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("socket %s: %w", path, err)
	}
	return fd, nil
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

// release removes the socket's file, then its lock, unless others replaced them after the directory
// was removed. The caller closes the listening descriptor.
func (s *socketFile) release() {
	if s.there() {
		os.Remove(s.path)
	}
	s.unlock()
}

// there reports whether the socket's file is the one that was bound.
func (s *socketFile) there() bool {
	now, err := os.Lstat(s.path)
	return err == nil && os.SameFile(now, s.bound)
}

func (s *socketFile) unlock() {
	if sameFile(s.lock, s.lock.Name()) {
		os.Remove(s.lock.Name()) // while the lock is held, so that no two processes hold files of that name
	}
	s.lock.Close()
}

// lockFile takes the lock file of path and signs it with this process's pid.
func lockFile(path string) (*os.File, error) {
	name := path + lockSuffix
	for range lockTries {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, sockMode)
		if err != nil {
			return nil, fmt.Errorf("socket lock: %w", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			defer f.Close()
			return nil, heldBy(path, f, err)
		}
		if sameFile(f, name) {
			if !signed(f) {
				f.Close()
				return nil, fmt.Errorf("socket lock %s: a file of somebody else's is there: %w", name, ErrForeign)
			}
			if err := sign(f); err != nil {
				f.Close()
				return nil, fmt.Errorf("socket lock: %w", err)
			}
			return f, nil
		}
		f.Close()
	}
	return nil, fmt.Errorf("socket lock %s: %w, it comes and goes", name, ErrInUse)
}

// signed reports whether a lock file is one of ours: empty, or with nothing but a holder's
// signature. Other programs have files of such names too (poetry.lock), which must be neither
// written nor removed.
func signed(f *os.File) bool {
	b := make([]byte, maxSignature+1)
	n, err := f.ReadAt(b, 0)
	if n == 0 {
		return errors.Is(err, io.EOF)
	}
	digits, whole := strings.CutSuffix(string(b[:n]), "\n")
	_, bad := strconv.ParseUint(digits, 10, 32)
	return whole && n <= maxSignature && bad == nil
}

// sign writes this process's signature into a lock file.
func sign(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := fmt.Fprintf(f, "%d\n", os.Getpid())
	return err
}

func heldBy(path string, f *os.File, err error) error {
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("socket lock %s: %w", f.Name(), err)
	}
	var b [32]byte
	n, _ := f.ReadAt(b[:], 0)
	return fmt.Errorf("socket %s: %w by process %s", path, ErrInUse, strings.TrimSpace(string(b[:n])))
}

func sameFile(f *os.File, name string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(name)
	return err == nil && os.SameFile(a, b)
}

// Listener is a Unix stream listener that holds its socket file's lock.
type Listener struct {
	*net.UnixListener
	file *socketFile
}

// ListenAdmin takes a socket directory, which only one agent at a time can have. If another has it
// the error wraps ErrInUse and names its process.
func ListenAdmin(dir string, group int) (*Listener, error) {
	l, err := Listen(filepath.Join(dir, Admin), group)
	if err != nil {
		return nil, fmt.Errorf("socket-dir: %w", err)
	}
	return l, nil
}

// Listen listens at path as all sockets of the agent do: in a directory that is closed to
// others, under a lock, replacing a dead socket but never a live one. group is a gid, 0 for none.
func Listen(path string, group int) (*Listener, error) {
	file, fd, err := claimSocket(path, group)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), path)
	l, err := net.FileListener(f)
	f.Close()
	if err != nil {
		file.release()
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return &Listener{UnixListener: l.(*net.UnixListener), file: file}, nil
}

// Reachable reports whether the socket's file still exists and is the one that was bound.
func (l *Listener) Reachable() bool { return l.file.there() }

// Close stops listening and removes the socket's file.
func (l *Listener) Close() error {
	err := l.UnixListener.Close()
	if err == nil {
		l.file.release()
	}
	return err
}
