package agent

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	maxMapCountFile = "/proc/sys/vm/max_map_count"
	usualMapCount   = 65530 // Linux's default
)

// mostRegions returns how many mappings the engines' memory may take: half. The rest is the
// process's.
func mostRegions() int { return mapCount(os.ReadFile(maxMapCountFile)) / 2 }

func mapCount(text []byte, err error) int {
	if n, bad := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && bad == nil && n > 0 {
		return n
	}
	return usualMapCount
}

// Shares of the limit of open files. Without them, clients that only connect could take all
// descriptors, and no engine could register while they stay.
const (
	ownDescriptors     = 128 // the agent's own: pool, sockets, movers, HTTP
	sessionDescriptors = 4   // its socket, its process, the device's copies of both
	maxPendingFDs      = 16384
	maxLookupPeers     = 1024
)

// share bounds the descriptors that clients may make this process open.
type share struct {
	sessions int   // at once
	pending  int64 // descriptors of registrations that are not complete, all sessions together
	peers    int64 // connections to look-up sockets, all sockets together
}

// shareOf divides the descriptors: of those that the agent does not need itself, a quarter
// is for incomplete registrations, an eighth for connections to look-up sockets.
func shareOf(files uint64, sessions int) share {
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
