package arena

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// HeldError is of a pool's file that others have.
type HeldError struct {
	Path    string
	Process int  // the agent's that had it last, in its own PID namespace; 0: not known
	Orphan  bool // that agent has ended, and a process that it left has the file
}

func (e *HeldError) Error() string {
	if e.Orphan {
		return fmt.Sprintf("dram: %s: in use by a process that its agent, process %d, left (fuser names it)", e.Path,
			e.Process)
	}
	return fmt.Sprintf("dram: %s: in use by process %d", e.Path, e.Process)
}

const lockTries = 16 // a process that releases a file may remove it

// lockPath opens a pool's file and locks it. The file must be this user's and writable by no other,
// since a writer controls what the engines compute with.
func lockPath(path string, abandon bool) (fd, own int, made bool, err error) {
	for range lockTries {
		fd, made, err = openPath(path)
		if err != nil {
			return -1, -1, false, err
		}
		if err = checkOwner(fd, path); err == nil {
			own, err = lock(fd, path, abandon)
		}
		if err != nil {
			_ = unix.Close(fd)
			return -1, -1, false, err
		}
		if samePath(fd, path) {
			return fd, own, made, nil
		}
		_, _ = unix.Close(fd), unix.Close(own) // it was removed meanwhile
	}
	return -1, -1, false, &HeldError{Path: path}
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
		return fmt.Errorf("dram: %s: mode %04o, allowed is 0600: others must not reach the blocks", path,
			st.Mode&0o7777)
	}
	return nil
}

// lock locks a file twice. Each lock belongs to an open file. All processes that map the arena
// share that of fd, so it ends with the last of them; that of own, which no other process has, ends
// with the agent. lock removes an orphan that is to be abandoned, while no other agent can take it:
// its memory is freed when its holder ends. Truncating it would kill one that copies.
func lock(fd int, path string, abandon bool) (own int, err error) {
	own, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("dram: lock %s: %w", path, err)
	}
	held := &HeldError{Path: path}
	err = unix.FcntlFlock(uintptr(own), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	if err == nil {
		held.Orphan = true
		err = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	}
	if err == nil {
		return own, nil
	}
	defer unix.Close(own)
	if !errors.Is(err, unix.EAGAIN) {
		return -1, fmt.Errorf("dram: lock %s: %w", path, err)
	}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil {
		if s, err := readSuper(fd, st.Size); err == nil {
			held.Process = int(s.process.Load())
		}
	}
	if held.Orphan && abandon && samePath(fd, path) {
		return -1, os.Remove(path)
	}
	return -1, held
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
