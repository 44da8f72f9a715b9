package dram

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"
)

// The kernel gets one preferred node, or several in turn; a node that does not exist is reported.
func TestArenaIsPlaced(t *testing.T) {
	if _, err := os.Stat("/proc/self/numa_maps"); err != nil {
		t.Skip("this kernel knows no NUMA nodes")
	}
	for want, nodes := range map[string][]int{
		"": nil, "NUMA node 0 first": {0}, "not on NUMA node 1024 first": {1024},
		"not on NUMA nodes [-1 0] in turn first": {0, -1},
	} {
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
