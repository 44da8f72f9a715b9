package agent

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// mappings counts the engines' memory that is open, of all sessions together. The kernel gives a process a number of mappings, and an
// address space: a process that has used one of them up cannot even make room for its own heap, and ends.
type mappings struct {
	regions int   // most at once
	bytes   int64 // most at once

	mu struct {
		sync.Mutex
		regions int
		bytes   int64
	}
}

const (
	maxMapCountFile = "/proc/sys/vm/max_map_count"
	usualMapCount   = 65530   // Linux's, unless told otherwise
	maxMappedBytes  = 1 << 46 // half of a process's address space
)

// newMappings leaves half of the mappings to the process itself.
func newMappings() *mappings {
	return &mappings{regions: mapCount(os.ReadFile(maxMapCountFile)) / 2, bytes: maxMappedBytes}
}

func mapCount(text []byte, err error) int {
	if n, bad := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && bad == nil && n > 0 {
		return n
	}
	return usualMapCount
}

// take counts regions that are to be opened, or says why they may not be.
func (m *mappings) take(regions int, bytes int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if left := m.regions - m.mu.regions; regions > left {
		return fmt.Errorf("%d, allowed: the %d that are left of %d of all sessions together (half of vm.max_map_count)", regions, left, m.regions)
	}
	if left := m.bytes - m.mu.bytes; bytes > left {
		return fmt.Errorf("%d bytes, allowed: the %d that are left of %d of all sessions together", bytes, left, m.bytes)
	}
	m.mu.regions += regions
	m.mu.bytes += bytes
	return nil
}

func (m *mappings) give(regions int, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.regions -= regions
	m.mu.bytes -= bytes
}

// open is the number of regions that are open.
func (m *mappings) open() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.regions
}

// What the limit of open files is divided into. Without that, clients that only connect would take all there are, and an engine
// would be told nothing for as long as they stay.
const (
	ownDescriptors     = 128 // the agent's own: pool, sockets, movers, HTTP
	sessionDescriptors = 4   // its socket, its process, the device's hold of both
	maxPendingFDs      = 16384
	maxLookupPeers     = 16384
)

// share is what clients may have of the descriptors that this process may open.
type share struct {
	sessions int   // at once
	pending  int64 // descriptors of registrations that are not complete, all sessions together
	peers    int64 // connections to look-up sockets, all sockets together
}

// shareDescriptors divides files descriptors: of what is not the agent's own a quarter is for registrations that are on their way, an eighth
// for connections to look-up sockets.
func shareDescriptors(files uint64, sessions int) share {
	left := int64(min(files, 1<<30)) - ownDescriptors
	pending, peers := max(min(left/4, maxPendingFDs), 1), max(min(left/8, maxLookupPeers), 1)
	return share{sessions: int(max(min((left-pending-peers)/sessionDescriptors, int64(sessions)), 1)), pending: pending, peers: peers}
}

// openFiles is the limit of open files of this process.
func openFiles() (uint64, error) {
	var r unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r)
	return r.Cur, err
}
