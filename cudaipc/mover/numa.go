package mover

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// bindThread binds this locked thread to the processors of a NUMA node, whose memory the kernel
// then prefers; processes that it starts inherit that. It returns the result as text: a container
// may not allow it, which costs only time.
func bindThread(node int) string {
	if node < 0 {
		return ""
	}
	set := processorsOf("/", node)
	if err := unix.SchedSetaffinity(0, &set); err != nil { // of no processor too
		return fmt.Sprintf("node %d: not bound: %v", node, err)
	}
	return fmt.Sprintf("node %d", node)
}

// processorsOf returns the processors of a node. Tests pass another root than /.
func processorsOf(root string, node int) (set unix.CPUSet) {
	folder := filepath.Join(root, "sys/devices/system/node/node"+strconv.Itoa(node), "cpu")
	links, _ := filepath.Glob(folder + "[0-9]*") // the pattern is well-formed
	for _, link := range links {
		if cpu, err := strconv.Atoi(strings.TrimPrefix(link, folder)); err == nil {
			set.Set(cpu)
		}
	}
	return set
}
