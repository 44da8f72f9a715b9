package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// pidName is a file with the process that has the directory. The lock itself is on the directory,
// so that it works where nothing can be written.
const pidName = "pid"

// lock opens the directory, making it if only its last element is missing, and locks it for this
// process.
func (d *dir) lock() error {
	fd, err := openDir(d.path)
	if errors.Is(err, unix.ENOENT) {
		if err = os.Mkdir(d.path, 0o700); err == nil {
			fd, err = openDir(d.path)
		}
	}
	if err != nil {
		return fmt.Errorf("disk: open directory %s: %w", d.path, err)
	}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		err = errors.Join(err, unix.Close(fd))
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("disk: %s is in use by process %s: %w", d.path, d.holder(), ErrLocked)
		}
		return fmt.Errorf("disk: lock %s: %w", d.path, err)
	}
	d.mu.Lock()
	d.lockFD = fd
	d.mu.Unlock()
	// The file is only for the message of another process, which works without it.
	_ = os.WriteFile(filepath.Join(d.path, pidName), fmt.Appendln(nil, os.Getpid()), 0o600)
	return nil
}

func openDir(path string) (int, error) {
	return retry(func() (int, error) { return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0) })
}

func (d *dir) holder() string {
	b, err := os.ReadFile(filepath.Join(d.path, pidName))
	if err != nil {
		return "(unknown)"
	}
	return strings.TrimSpace(string(b))
}
