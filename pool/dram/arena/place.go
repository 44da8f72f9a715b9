package arena

import (
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxNode is the last NUMA node of Linux.
const maxNode = 1023

// Modes of mbind, as linux/mempolicy.h has them. In both, pages come from other nodes when these are full.
const (
	mpolPreferred  = 1
	mpolInterleave = 3
)

// Place has the kernel take an arena's pages from these NUMA nodes first, and from several in turn. The policy is the file's: it
// counts for whichever process touches a page first, and not for pages that are there already. It says what came of it; a kernel
// or a container that does not allow it makes things slower, not wrong.
func (a *Arena) Place(nodes []int) string {
	if len(nodes) == 0 {
		return ""
	}
	if err := bindPages(a.raw, nodes); err != nil {
		return fmt.Sprintf("not on %s first: %v", nameNodes(nodes), err)
	}
	return nameNodes(nodes) + " first"
}

func bindPages(mem []byte, nodes []int) error {
	var mask [(maxNode + 1) / 64]uint64
	for _, n := range nodes {
		if n < 0 || n > maxNode {
			return fmt.Errorf("node %d is not within 0 and %d", n, maxNode)
		}
		mask[n/64] |= 1 << (n % 64)
	}
	mode := uintptr(mpolPreferred)
	if len(nodes) > 1 {
		mode = mpolInterleave
	}
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), mode,
		uintptr(unsafe.Pointer(&mask)), maxNode+2, 0)
	if errno != 0 {
		return fmt.Errorf("mbind: %w", errno)
	}
	return nil
}

func nameNodes(nodes []int) string {
	if len(nodes) == 1 {
		return fmt.Sprintf("NUMA node %d", nodes[0])
	}
	return fmt.Sprintf("NUMA nodes %v in turn", slices.Sorted(slices.Values(nodes)))
}
