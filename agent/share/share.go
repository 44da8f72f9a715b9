// Package share divides what the kernel allows this process, mappings and open files, among the
// clients and the process itself.
package share

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Mappings counts the open engine memory of all sessions. The kernel limits a process's mappings
// and address space: a process that exhausts one of them cannot grow its heap, and ends.
type Mappings struct {
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

// NewMappings reserves half of the mappings for the process itself.
func NewMappings() *Mappings {
	return &Mappings{regions: mapCount(os.ReadFile(maxMapCountFile)) / 2, bytes: maxMappedBytes}
}

func mapCount(text []byte, err error) int {
	if n, bad := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && bad == nil && n > 0 {
		return n
	}
	return usualMapCount
}

// Take counts regions that are to be opened, or returns an error if a limit forbids them.
func (m *Mappings) Take(regions int, bytes int64) error {
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

// Give ends the count of regions that were closed.
func (m *Mappings) Give(regions int, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.regions -= regions
	m.mu.bytes -= bytes
}

// Open returns the number of open regions.
func (m *Mappings) Open() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.regions
}

// Bound replaces both limits. Regions beyond them that are open stay.
func (m *Mappings) Bound(regions int, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.regions, m.bytes = regions, bytes
}

// Bytes returns the bytes of the open regions.
func (m *Mappings) Bytes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.mu.bytes
}

// Shares of the limit of open files. Without them, clients that only connect could take all
// descriptors, and no engine could register while they stay.
const (
	ownDescriptors     = 128 // the agent's own: pool, sockets, movers, HTTP
	sessionDescriptors = 4   // its socket, its process, the device's copies of both
	maxPendingFDs      = 16384
	maxLookupPeers     = 1024
)

// Share bounds the descriptors that clients may make this process open.
type Share struct {
	Sessions int   // at once
	Pending  int64 // descriptors of registrations that are not complete, all sessions together
	Peers    int64 // connections to look-up sockets, all sockets together
}

// Descriptors divides the descriptors: of those that the agent does not need itself, a quarter
// is for incomplete registrations, an eighth for connections to look-up sockets.
func Descriptors(files uint64, sessions int) Share {
	left := int64(min(files, 1<<30)) - ownDescriptors
	pending, peers := max(min(left/4, maxPendingFDs), 1), max(min(left/8, maxLookupPeers), 1)
	return Share{Sessions: int(max(min((left-pending-peers)/sessionDescriptors, int64(sessions)), 1)), Pending: pending,
		Peers: peers}
}

// OpenFiles returns this process's limit of open files.
func OpenFiles() (uint64, error) {
	var r unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r)
	return r.Cur, err
}
