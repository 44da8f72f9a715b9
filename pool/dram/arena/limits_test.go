package arena

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// machine is a made-up /proc and /sys.
func machine(t *testing.T, cgroup string, content map[string]string) files {
	dir := t.TempDir()
	content["meminfo"] = "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n" +
		"HugePages_Free:      100\nHugePages_Rsvd:       30\nHugepagesize:       2048 kB\n"
	content["cgroup"] = cgroup
	for name, text := range content {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return files{
		meminfo: filepath.Join(dir, "meminfo"), cgroup: filepath.Join(dir, "cgroup"), root: filepath.Join(dir, "sys"),
	}
}

func TestPoolLargerThanItsCgroupIsRefused(t *testing.T) {
	for name, m := range map[string]files{
		"v2": machine(
			t, "0::/a/b\n", map[string]string{"sys/a/b/memory.max": "8589934592\n", "sys/a/memory.max": "max\n"},
		),
		"v2, a group above": machine(
			t, "0::/a/b\n", map[string]string{"sys/a/memory.max": "8589934592\n", "sys/a/b/memory.max": "max\n"},
		),
		"v2, inside its root": machine(t, "0::/\n", map[string]string{"sys/memory.max": "8589934592\n"}),
		"v2, beside v1":       machine(t, "3:cpu:/\n0::/\n", map[string]string{"sys/memory.max": "8589934592\n"}),
	} {
		if err := checkMemory(8<<30, m); err != nil {
			t.Errorf("%s: 8 GiB: %v", name, err)
		}
		err := checkMemory(8<<30+1, m)
		if !errors.Is(err, pool.ErrTooLarge) {
			t.Errorf("%s: more than 8 GiB: %v, want ErrTooLarge", name, err)
			continue
		}
		for _, figure := range []string{"8.00 GiB", "16.00 GiB", "memory."} {
			if !strings.Contains(err.Error(), figure) {
				t.Errorf("%s: %q does not name %q", name, err, figure)
			}
		}
	}
}

func TestPoolLargerThanTheMachineIsRefused(t *testing.T) {
	m := machine(t, "0::/\n", map[string]string{"sys/memory.max": "max\n"})
	if err := checkMemory(16<<30, m); err != nil {
		t.Errorf("16 GiB: %v", err)
	}
	const there = "has 32.00 GiB, of which 16.00 GiB are available, the cgroup allows no limit"
	for size, never := range map[int64]bool{17 << 30: false, 32 << 30: false, 33 << 30: true} {
		if err := checkMemory(size, m); err == nil || errors.Is(err, pool.ErrTooLarge) != never ||
			!strings.Contains(err.Error(), there) {
			t.Errorf("%s: %v, want what there is, and ErrTooLarge: %v", gib(size), err, never)
		}
	}
	if n, err := freeHugePages(m); n != 70 || err != nil {
		t.Errorf("free huge pages: %d, %v; want 70", n, err)
	}
	if _, err := Open(1<<40, true); !errors.Is(err, pool.ErrTooLarge) {
		t.Errorf("a pool of 1 TiB on this machine: %v, want ErrTooLarge", err)
	}
}
