package mover

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// nodeFolder holds one folder for each NUMA node.
const nodeFolder = "/sys/devices/system/node/node"

const (
	mpolPreferred = 1    // linux/mempolicy.h: this node first, others when it is full
	maxNode       = 1023 // Linux has at most 1024 nodes
)

// bindThread binds this locked thread to a NUMA node; processes that it starts inherit that. It
// returns the result as text: a container may not allow it, which costs only time.
func bindThread(node int) string {
	if node < 0 {
		return ""
	}
	err := bindCPUs(node)
	if err == nil {
		err = preferMemory(node)
	}
	if err != nil {
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

func preferMemory(node int) error {
	if node > maxNode {
		return fmt.Errorf("node %d, at most %d", node, maxNode)
	}
	var mask [(maxNode + 1) / 64]uint64
	mask[node/64] = 1 << (node % 64)
	_, _, errno := unix.RawSyscall(unix.SYS_SET_MEMPOLICY, mpolPreferred, uintptr(unsafe.Pointer(&mask)), maxNode+2)
	if errno != 0 {
		return fmt.Errorf("set_mempolicy: %w", errno)
	}
	return nil
}
