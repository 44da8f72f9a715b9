package peer

import (
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// ServerStats are the state and the counters of a server.
type ServerStats struct {
	Connections, Pending, Subscriptions int   // now
	Held                                int64 // bytes of the subscriptions, as Limits counts them

	Accepted        uint64 // connections authenticated
	Refused         uint64 // closed because there were too many connections
	RefusedPending  uint64 // closed because too many were unauthenticated
	Unauthenticated uint64 // that failed to authenticate in time, or gave way before
	Lost            uint64 // ended by silence, or by what does not take what is sent to it
	Malformed       uint64 // ended because the peer broke the protocol

	Pinned        int64        // bytes for one-sided reads, now
	Placed        uint64       // shards of blocks whose places were told; they are in Blocks, too
	Ended         [ends]uint64 // fetches of peers that ended, by how; index is an End
	Blocks, Bytes uint64       // shards of blocks sent, and their bytes
	Seconds       float64      // spent sending
}

// ClientStats are the state and the counters of a client.
type ClientStats struct {
	Fetches       int             // now
	Done          [ends]uint64    // fetches that ended, by how; index is an End
	Refused       uint64          // with ErrBusy, or a host that is not allowed
	Suspended     uint64          // with ErrSuspended
	Blocks, Bytes uint64          // stored, with all their shards
	Seconds       float64         // of the fetches together
	Read          uint64          // shards of blocks that came by one-sided reads
	ReadBytes     uint64          // of them
	ReadsFailed   uint64          // one-sided reads that failed; their blocks were asked for in frames
	Failed        [Reasons]uint64 // blocks, by reason; index is a Reason
	Peers         []AddressStats  // by address, at most ClientConfig.Peers
}

// AddressStats are the state of one address.
type AddressStats struct {
	Peer    string `json:"peer"`
	State   string `json:"state"`           // up, idle (no connection), half-open, open (suspended)
	Error   string `json:"error,omitempty"` // the last failure, unless the state is up
	Fetches int    `json:"fetches"`         // now
	Opened  uint64 `json:"breaker_opened"`  // times that it was suspended
}

// counts are the counters of a server. Their lock is a leaf.
type counts struct {
	mu  sync.Mutex
	now ServerStats
}

func (c *counts) add(do func(s *ServerStats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	do(&c.now)
}

// Stats returns the state and the counters.
func (s *Server) Stats() (out ServerStats) {
	s.count.add(func(now *ServerStats) { out = *now })
	out.Held, out.Pinned = s.budget.taken(), s.pinned.Load()
	s.mu.Lock()
	defer s.mu.Unlock()
	out.Connections, out.Pending = len(s.conns), len(s.pending)
	return out
}

// reasonOf returns why a block was not sent or stored, by its status.
func reasonOf(s pool.Status) Reason {
	switch s {
	case pool.Exists, pool.InProgress:
		return Had
	case pool.Busy:
		return Busy
	case pool.Stale:
		return Stale
	case pool.Missing:
		return Missing
	case pool.Corrupt:
		return Corrupt
	}
	return Invalid
}
