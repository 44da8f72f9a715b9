package agent

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// mappings counts the open engine memory of all sessions. The kernel limits a process's mappings
// and address space: a process that exhausts one of them cannot grow its heap, and ends.
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
	usualMapCount   = 65530   // Linux's default
	maxMappedBytes  = 1 << 46 // half of a process's address space
)

// newMappings reserves half of the mappings for the process itself.
func newMappings() *mappings {
	return &mappings{regions: mapCount(os.ReadFile(maxMapCountFile)) / 2, bytes: maxMappedBytes}
}

func mapCount(text []byte, err error) int {
	if n, bad := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && bad == nil && n > 0 {
		return n
	}
	return usualMapCount
}

// take counts regions that are to be opened, or returns an error if a limit forbids them.
func (m *mappings) take(regions int, bytes int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if left := m.regions - m.mu.regions; regions > left {
		return fmt.Errorf("%d, allowed: the %d that are left of %d of all sessions together (half of vm.max_map_count)",
			regions, left, m.regions)
	}
	if left := m.bytes - m.mu.bytes; bytes > left {
		return fmt.Errorf("%d bytes, allowed: the %d that are left of %d of all sessions together", bytes, left,
			m.bytes)
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

// open returns the number of open regions.
func (m *mappings) open() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.regions
}

// Shares of the limit of open files. Without them, clients that only connect could take all
// descriptors, and no engine could register while they stay.
const (
	ownDescriptors     = 128 // the agent's own: pool, sockets, movers, HTTP
	sessionDescriptors = 4   // its socket, its process, the device's copies of both
	maxPendingFDs      = 16384
	maxLookupPeers     = 16384
)

// share bounds the descriptors that clients may make this process open.
type share struct {
	sessions int   // at once
	pending  int64 // descriptors of registrations that are not complete, all sessions together
	peers    int64 // connections to look-up sockets, all sockets together
}

// shareDescriptors divides the descriptors: of those that the agent does not need itself, a quarter
// is for incomplete registrations, an eighth for connections to look-up sockets.
func shareDescriptors(files uint64, sessions int) share {
	left := int64(min(files, 1<<30)) - ownDescriptors
	pending, peers := max(min(left/4, maxPendingFDs), 1), max(min(left/8, maxLookupPeers), 1)
	return share{sessions: int(max(min((left-pending-peers)/sessionDescriptors, int64(sessions)), 1)), pending: pending,
		peers: peers}
}

// openFiles returns this process's limit of open files.
func openFiles() (uint64, error) {
	var r unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r)
	return r.Cur, err
}
