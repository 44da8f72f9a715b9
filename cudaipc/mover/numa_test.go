package mover

import (
	"os"
	"path/filepath"
	"testing"
)

func TestProcessorsOfANode(t *testing.T) {
	root := t.TempDir()
	node := filepath.Join(root, "sys/devices/system/node/node3")
	for _, name := range []string{"cpu0", "cpu12", "cpulist", "cpumap", "memory7"} {
		if err := os.MkdirAll(filepath.Join(node, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if set := processorsOf(root, 3); set.Count() != 2 || !set.IsSet(0) || !set.IsSet(12) {
		t.Errorf("%d processors, want 0 and 12", set.Count())
	}
	if set := processorsOf(root, 4); set.Count() != 0 {
		t.Errorf("%d processors of no node", set.Count())
	}
}
