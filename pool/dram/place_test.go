package dram

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"
)

// The kernel is told where the pages are to come from, in one node and in several; a node that cannot be is said.
func TestArenaIsPlaced(t *testing.T) {
	if _, err := os.Stat("/proc/self/numa_maps"); err != nil {
		t.Skip("this kernel knows no NUMA nodes")
	}
	for want, nodes := range map[string][]int{"": nil, "NUMA node 0 first": {0}, "not on NUMA node 1024 first": {1024}, "not on NUMA nodes [-1 0] in turn first": {0, -1}} {
		p, err := Open(Options{Bytes: 1 << 20, Nodes: nodes, HugePages: Off})
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Info().Placement; !strings.HasPrefix(got, want) || want == "" && got != "" {
			t.Errorf("nodes %v: %q, want %q", nodes, got, want)
		}
		policy := numaPolicy(t, p.base)
		if placed := strings.HasPrefix(policy, "prefer"); placed != (want == "NUMA node 0 first") {
			t.Errorf("nodes %v: the kernel's policy is %q", nodes, policy)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// numaPolicy is the second word of the mapping's line.
func numaPolicy(t *testing.T, mem []byte) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/numa_maps")
	if err != nil {
		t.Fatal(err)
	}
	at := fmt.Sprintf("%08x ", uintptr(unsafe.Pointer(&mem[0])))
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, at); ok {
			return strings.Fields(rest)[0]
		}
	}
	t.Fatalf("no mapping at %s", at)
	return ""
}

// What keeps the kernel from making up huge pages is said with the file that says so.
func TestWhyNoTransparentPages(t *testing.T) {
	p, err := Open(Options{Bytes: 1 << 20, HugePages: Off})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for text, refused := range map[string]bool{
		"always within_size advise [never] deny force\n": true, "always within_size advise never [deny] force\n": true,
		"always within_size [advise] never deny force\n": false, "[always] within_size advise never deny force\n": false,
	} {
		file := filepath.Join(t.TempDir(), "shmem_enabled")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if why := p.arena.askTransparent(file); refused != strings.Contains(why, file) || !refused && why != "" {
			t.Errorf("%q: %q", text, why)
		}
	}
	if why := p.arena.askTransparent(filepath.Join(t.TempDir(), "none")); why == "" {
		t.Error("a kernel without the setting: nothing is said")
	}
}

// Only the arena's own mappings count, and only their pages of files.
func TestHugeBytesAreCounted(t *testing.T) {
	const smaps = `7f0000000000-7f0000200000 rw-s 00000000 00:01 7 /memfd:kvagent-pool
Rss:                2048 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
7f0000200000-7f0000600000 rw-s 00200000 00:01 7 /memfd:kvagent-pool
ShmemPmdMapped:     2048 kB
FilePmdMapped:         4 kB
VmFlags: rd wr sh
7f0000600000-7f0000800000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
ShmemPmdMapped:     2048 kB
`
	if n, err := sumHuge(strings.NewReader(smaps), 0x7f0000000000, 0x7f0000600000); err != nil || n != 4<<20+4<<10 {
		t.Errorf("%d bytes, %v, want %d", n, err, 4<<20+4<<10)
	}
	if _, err := sumHuge(strings.NewReader("0-1000 rw-s 0 0 0\nShmemPmdMapped: x kB\n"), 0, 1<<20); err == nil {
		t.Error("a count that is none: no error")
	}
	p, err := Open(Options{Bytes: 1 << 20, HugePages: Off})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if n, err := p.HugeBytes(); err != nil || n < 0 || n > 1<<20 {
		t.Errorf("%d of %d bytes, %v", n, 1<<20, err)
	}
}
