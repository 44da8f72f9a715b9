package arena

import (
	"bufio"
	"fmt"
	"math"
	"os"
	"path"
	"strconv"
	"strings"

	"github.com/kvagent/kvagent/pool"
)

// files are the kernel's sources of memory limits; tests replace them.
type files struct{ meminfo, cgroup, root string }

var systemFiles = files{meminfo: "/proc/meminfo", cgroup: "/proc/self/cgroup", root: "/sys/fs/cgroup"}

// checkMemory refuses an arena of ordinary pages for which the cgroup or the machine has no memory:
// with ErrTooLarge if they never can, whatever others free.
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
		err = fmt.Errorf("%w: %w", err, pool.ErrTooLarge)
	}
	return err
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

// cgroupLimit returns the smallest memory limit of this process's groups, of cgroup v1 or v2, and
// its file.
func cgroupLimit(f files) (limit int64, where string) {
	limit = noLimit
	file, err := os.Open(f.cgroup)
	if err != nil {
		return limit, ""
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		parts := strings.SplitN(lines.Text(), ":", 3) // hierarchy, controllers, path
		if len(parts) != 3 {
			continue
		}
		var roots []string
		name := "memory.max"
		switch {
		case parts[0] == "0":
			roots = []string{f.root, path.Join(f.root, "unified")}
		case hasController(parts[1], "memory"):
			roots, name = []string{path.Join(f.root, "memory")}, "memory.limit_in_bytes"
		}
		for _, root := range roots {
			if n, at := smallest(root, parts[2], name); n < limit {
				limit, where = n, at
			}
		}
	}
	return limit, where
}

func hasController(list, want string) bool {
	for c := range strings.SplitSeq(list, ",") {
		if c == want {
			return true
		}
	}
	return false
}

// smallest returns the least limit of a group and its ancestors. In a container the path may be the
// host's and the files may lie at the root; a missing file is no limit.
func smallest(root, group, name string) (limit int64, where string) {
	limit = noLimit
	for {
		file := path.Join(root, group, name)
		if n, ok := readLimit(file); ok && n < limit {
			limit, where = n, file
		}
		if group == "/" || group == "." || group == "" {
			return limit, where
		}
		group = path.Dir(group)
	}
}

func readLimit(file string) (int64, bool) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64) // "max" is no number
	if err != nil || n >= noLimit&^(PageBytes-1) {
		return 0, false
	}
	return n, true
}

// HugePagesFree returns the number of free, unreserved pages of 2 MiB of this machine.
func HugePagesFree() (int64, error) { return freeHugePages(systemFiles) }
