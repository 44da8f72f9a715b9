package arena

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrHeld matches every HeldError: another process has the pool's file.
var ErrHeld = errors.New("in use")

// HeldError names the process that has a pool's file. The lock belongs to the open file
// description, which all processes that map the arena share with the agent that opened it. So an
// agent that has exited still holds it while one of its movers runs.
type HeldError struct {
	Path    string
	Process int    // that signed it last, in its own PID namespace; 0: an agent that is releasing it
	Began   uint64 // start of that process, in clock ticks since boot
	Host    string // of that process
	Exited  bool   // no such process runs here any more
}

// Error names the process.
func (e *HeldError) Error() string {
	if e.Process == 0 {
		return fmt.Sprintf("dram: %s: %v by an agent that ends, or by a process that it left (fuser names it)", e.Path,
			ErrHeld)
	}
	text := fmt.Sprintf("dram: %s: %v by process %d", e.Path, ErrHeld, e.Process)
	if own, _ := os.Hostname(); e.Host != own && e.Host != "" {
		text += " on " + e.Host
	}
	if e.Exited {
		text += ", which has exited"
	}
	return text
}

// Unwrap returns ErrHeld.
func (e *HeldError) Unwrap() error { return ErrHeld }

const lockTries = 16 // a process that releases a file may remove it

// lockPath opens a pool's file and locks it. The file must be this user's and writable by no other,
// since a writer controls what the engines compute with.
func lockPath(path string) (fd int, made bool, err error) {
	for range lockTries {
		fd, made, err = openPath(path)
		if err != nil {
			return -1, false, err
		}
		if err = checkOwner(fd, path); err == nil {
			err = lock(fd, path)
		}
		if err != nil {
			_ = unix.Close(fd)
			return -1, false, err
		}
		if samePath(fd, path) {
			return fd, made, nil
		}
		_ = unix.Close(fd) // it was removed meanwhile
	}
	return -1, false, fmt.Errorf("dram: %s: %w, it comes and goes", path, ErrHeld)
}

func openPath(path string) (fd int, made bool, err error) {
	const flags = unix.O_RDWR | unix.O_CLOEXEC | unix.O_NOFOLLOW
	fd, err = unix.Open(path, flags, 0)
	if errors.Is(err, unix.ENOENT) {
		made = true
		fd, err = unix.Open(path, flags|unix.O_CREAT, 0o600)
	}
	switch {
	case errors.Is(err, unix.ELOOP):
		return -1, false, fmt.Errorf("dram: %s: a symbolic link, allowed is a file", path)
	case errors.Is(err, unix.ENOENT):
		return -1, false, fmt.Errorf("dram: %s: the directory %s is not there", path, filepath.Dir(path))
	case err != nil:
		return -1, false, fmt.Errorf("dram: open %s: %w", path, err)
	}
	return fd, made, nil
}

func checkOwner(fd int, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("dram: %s: %w", path, err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fmt.Errorf("dram: %s: not a regular file", path)
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("dram: %s: belongs to uid %d, allowed is %d", path, st.Uid, os.Geteuid())
	case st.Mode&0o077 != 0:
		return fmt.Errorf(
			"dram: %s: mode %04o, allowed is 0600: others must not reach the blocks", path, st.Mode&0o7777,
		)
	}
	return nil
}

func lock(fd int, path string) error {
	err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	for errors.Is(err, unix.EINTR) {
		err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return heldBy(fd, path)
	}
	if err != nil {
		return fmt.Errorf("dram: lock %s: %w", path, err)
	}
	return nil
}

func heldBy(fd int, path string) error {
	held := &HeldError{Path: path}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil {
		if s, err := readSuper(fd, st.Size); err == nil {
			held.Process, held.Began, held.Host = int(s.process.Load()), s.began.Load(), s.hostName()
			held.Exited = held.Process != 0 && ProcessBegan(held.Process) != held.Began
		}
	}
	return held
}

func samePath(fd int, path string) bool {
	var open, named unix.Stat_t
	return unix.Fstat(fd, &open) == nil && unix.Lstat(path, &named) == nil && open.Ino == named.Ino &&
		open.Dev == named.Dev
}

// checkFilesystem returns the size of a page of the file's memory, and why it is not huge.
func checkFilesystem(fd int, path string) (page int64, reason string, err error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return 0, "", fmt.Errorf("dram: %s: %w", path, err)
	}
	switch fs.Type {
	case unix.HUGETLBFS_MAGIC:
		return fs.Bsize, "", nil
	case unix.TMPFS_MAGIC:
		return int64(os.Getpagesize()), "on tmpfs, not hugetlbfs", nil
	}
	return 0, "", fmt.Errorf("dram: %s: on a file system of type %#x, allowed are tmpfs and hugetlbfs: "+
		"on any other the kernel would write every block to a device", path, fs.Type)
}

// ProcessBegan returns the start of a process, in clock ticks since boot; 0 if it does not exist.
func ProcessBegan(pid int) uint64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name may contain any character; the fields after its last bracket begin with field 3.
	words := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(words) < 20 {
		return 0
	}
	n, err := strconv.ParseUint(words[22-3], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
