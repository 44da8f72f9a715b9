package arena

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

// providePiece is allocated in one call; a signal makes the kernel restart a call.
const providePiece = 32 << 20

// make makes the file anew and maps it. The magic of the superblock is written first, so that an
// unfinished file is recognised as a pool's, and its format last.
func (f *File) make(seed [5]uint64, now time.Time) error {
	l := &f.layout
	for _, step := range []func() error{
		func() error { return f.size(0) },
		func() error {
			if l.page > PageBytes {
				return nil // huge pages are reserved: provide finds out whether there are enough
			}
			return checkMemory(l.least(), systemFiles)
		},
		func() error { return f.size(l.End) },
		func() error { return f.provide(l.Slabs, l.End) },
		f.mapMeta,
		func() error { f.super.magic = superMagic; return nil },
		func() error { return f.provide(0, l.Headers) },
		func() error { return f.provide(l.Learned/l.page*l.page, l.Spaces) },
	} {
		if err := step(); err != nil {
			if f.meta != nil {
				err = errors.Join(err, unix.Munmap(f.meta))
			}
			_ = f.size(0) // frees the memory; the first error is returned
			return err
		}
	}
	s := f.super
	s.arena, s.slab, s.page, s.created, s.seed = l.arena, l.slab, l.page, now.UnixNano(), seed
	s.check = s.sum()
	f.open()
	s.format.Store(fileFormat)
	return nil
}

func (f *File) size(n int64) error {
	if err := unix.Ftruncate(f.fd, n); err != nil {
		return fmt.Errorf("dram: %s: %d bytes: %w", f.path, n, err)
	}
	return nil
}

// provide allocates the memory of a range of the file, so that accessing it cannot fail. It does
// not lengthen a file that was cut meanwhile: zeros would be read where blocks were.
func (f *File) provide(from, to int64) error {
	for from < to {
		n := min(providePiece, to-from)
		switch err := unix.Fallocate(f.fd, unix.FALLOC_FL_KEEP_SIZE, from, n); {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.ENOMEM):
			return f.full(to-from, err)
		case err != nil:
			return fmt.Errorf("dram: %s: memory for %d bytes: %w", f.path, to-from, err)
		}
		from += n
	}
	return nil
}

// full returns an error with the room that there is.
func (f *File) full(need int64, err error) error {
	var fs unix.Statfs_t
	if f.layout.page > PageBytes {
		free, _ := freeHugePages(systemFiles) // 0 if unknown
		return fmt.Errorf(
			"dram: %s: no room for %s more in huge pages, of those of 2 MiB %d are free: %w", f.path, gib(need), free,
			err,
		)
	}
	_ = unix.Fstatfs(f.fd, &fs) // zeros if unknown
	return fmt.Errorf("dram: %s: no room for %s more: its file system has %s, of them free %s: %w",
		f.path, gib(need), gib(int64(fs.Blocks)*fs.Bsize), gib(int64(fs.Bavail)*fs.Bsize), err)
}

// grow allocates a range of a sparse area; false, and counted, if the file system is full.
func (f *File) grow(from, to int64) bool {
	page := f.layout.page
	if f.provide(from/page*page, roundUp(to, page)) != nil {
		f.refused++
		return false
	}
	return true
}

// files are the kernel's sources of memory limits; tests replace them.
type files struct{ meminfo, cgroup, root string }

var systemFiles = files{meminfo: "/proc/meminfo", cgroup: "/proc/self/cgroup", root: "/sys/fs/cgroup"}

// ErrNoMemory is for memory that the machine has, and that is in use now.
var ErrNoMemory = errors.New("memory is in use")

// checkMemory refuses an arena of ordinary pages for which the cgroup or the machine has no memory:
// with ErrTooLarge if they never can, whatever others free, else with ErrNoMemory.
func checkMemory(bytes int64, f files) error {
	total, err := meminfo(f, "MemTotal:")
	if err != nil {
		return fmt.Errorf("dram: how much memory there is: %w", err)
	}
	available, err := meminfo(f, "MemAvailable:")
	if err != nil {
		return fmt.Errorf("dram: how much memory there is: %w", err)
	}
	group, where := cgroupLimit(f)
	if bytes <= available<<10 && bytes <= group {
		return nil
	}
	limit := "no limit"
	if where != "" {
		limit = fmt.Sprintf("%s (%s)", gib(group), where)
	}
	err = fmt.Errorf("dram: a pool of %s: the machine has %s, of which %s are available, the cgroup allows %s",
		gib(bytes), gib(total<<10), gib(available<<10), limit)
	if bytes > total<<10 || bytes > group {
		return fmt.Errorf("%w: %w", err, pool.ErrTooLarge)
	}
	return fmt.Errorf("%w: %w", err, ErrNoMemory)
}

func gib(n int64) string { return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30)) }

// freeHugePages returns the number of free, unreserved pages of 2 MiB.
func freeHugePages(f files) (int64, error) {
	if size, err := meminfo(f, "Hugepagesize:"); err != nil || size != HugePageBytes>>10 {
		return 0, fmt.Errorf("huge pages of %d KiB, not 2048", size)
	}
	free, err := meminfo(f, "HugePages_Free:")
	if err != nil {
		return 0, err
	}
	reserved, err := meminfo(f, "HugePages_Rsvd:")
	return free - reserved, err
}

func meminfo(f files, key string) (int64, error) {
	b, err := os.ReadFile(f.meminfo)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, key); ok {
			return strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", f.meminfo, key)
}

const noLimit = math.MaxInt64

// cgroupLimit returns the smallest memory limit of this process's groups (v2), and its file.
func cgroupLimit(f files) (limit int64, where string) {
	text, _ := os.ReadFile(f.cgroup) // without it there is no limit
	for line := range strings.Lines(string(text)) {
		if group, unified := strings.CutPrefix(strings.TrimSpace(line), "0::"); unified {
			return smallest(f.root, group)
		}
	}
	return noLimit, ""
}

// smallest returns the least limit of a group and its ancestors. In a container the path may be the
// host's and the files may lie at the root; a missing file is no limit.
func smallest(root, group string) (limit int64, where string) {
	limit = noLimit
	for {
		file := path.Join(root, group, "memory.max")
		text, _ := os.ReadFile(file)
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64) // "max" is no number
		if err == nil && n < limit {
			limit, where = n, file
		}
		if group == "/" || group == "." || group == "" {
			return limit, where
		}
		group = path.Dir(group)
	}
}
