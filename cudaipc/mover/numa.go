package mover

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// nodeFolder holds one folder for each NUMA node.
const nodeFolder = "/sys/devices/system/node/node"

// bindThread binds this locked thread to the processors of a NUMA node, whose memory the kernel
// then prefers; processes that it starts inherit that. It returns the result as text: a container
// may not allow it, which costs only time.
func bindThread(node int) string {
	if node < 0 {
		return ""
	}
	if err := bindCPUs(node); err != nil {
		return fmt.Sprintf("node %d: not bound: %v", node, err)
	}
	return fmt.Sprintf("node %d", node)
}

func bindCPUs(node int) error {
	text, err := os.ReadFile(nodeFolder + strconv.Itoa(node) + "/cpulist")
	if err != nil {
		return err
	}
	set, err := parseCPUs(strings.TrimSpace(string(text)))
	if err != nil {
		return err
	}
	return unix.SchedSetaffinity(0, &set)
}

// parseCPUs reads a list as Linux writes it: 0-3,8.
func parseCPUs(list string) (set unix.CPUSet, err error) {
	for part := range strings.SplitSeq(list, ",") {
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		from, err := strconv.Atoi(low)
		if err != nil {
			return set, fmt.Errorf("processors %q: %w", list, err)
		}
		to, err := strconv.Atoi(high)
		if err != nil || to < from {
			return set, fmt.Errorf("processors %q: not a list: %w", list, err)
		}
		for cpu := from; cpu <= to; cpu++ {
			set.Set(cpu)
		}
	}
	return set, nil
}
