package agent

import (
	"golang.org/x/sys/unix"
)

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
