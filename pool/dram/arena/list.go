package arena

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// FileState is whether a process has a pool's file.
type FileState string

// Live: a process has it open. Abandoned: none has.
const (
	Live      FileState = "live"
	Abandoned FileState = "abandoned"
)

// FileInfo describes a pool's file found in a directory.
type FileInfo struct {
	Path      string
	State     FileState
	Process   int    // the last that had it
	Host      string // of that process
	Format    uint32
	Bytes     int64         // of the pool's slots; 0 if the format is not known
	Allocated int64         // memory it holds
	Age       time.Duration // since it was last marked in use
}

// ListFiles finds the pools' files in a directory. It skips other files, and files that this user
// may not read.
func ListFiles(dir string) ([]FileInfo, error) {
	all, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []FileInfo
	for _, e := range all {
		if !e.Type().IsRegular() {
			continue
		}
		if f, ok := inspect(filepath.Join(dir, e.Name())); ok {
			out = append(out, f)
		}
	}
	return out, nil
}

func inspect(path string) (f FileInfo, ok bool) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return f, false
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return f, false
	}
	b, err := readSuper(fd, st.Size)
	if err != nil {
		return f, false
	}
	s, err := decodeSuper(b)
	if errors.Is(err, errForeign) || errors.Is(err, errBlank) {
		return f, false
	}
	by := readSignature(b)
	f = FileInfo{
		Path: path, State: Abandoned, Process: by.process, Host: by.host, Format: s.format, Bytes: s.arena,
		Allocated: st.Blocks * 512, Age: max(time.Since(by.alive), 0),
	}
	// The shared lock is held for a moment: an agent that starts meanwhile retries.
	if err := unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB); err != nil {
		f.State = Live
	}
	return f, true
}

// RemoveFile removes a pool's file that no agent has, and frees its memory.
func RemoveFile(path string) error {
	if _, ok := inspect(path); !ok {
		return fmt.Errorf("dram: %s: not a pool's file, or not readable", path)
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("dram: open %s: %w", path, err)
	}
	defer unix.Close(fd)
	if err := lock(fd, path); err != nil {
		return err
	}
	if !samePath(fd, path) {
		return fmt.Errorf("dram: %s: another file is there now", path)
	}
	return os.Remove(path)
}
