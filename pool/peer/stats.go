package peer

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

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

	Pinned        int64           // bytes for one-sided reads, now
	Placed        uint64          // shards of blocks whose places were told; they are in Blocks, too
	Subscribed    uint64          // fetches of peers
	Ended         [ends]uint64    // of those, by how they ended; index is an End
	Blocks, Bytes uint64          // shards of blocks sent, and their bytes
	NotSent       [Reasons]uint64 // shards asked for and not sent, by reason; index is a Reason
	Seconds       float64         // spent sending
	Peers         []HostTraffic   // by host, at most maxTraffic and "other"
}

// HostTraffic is what was sent to one host.
type HostTraffic struct {
	Peer    string  `json:"peer" label:"peer"`
	Blocks  uint64  `json:"blocks" metric:"peer_blocks_total{op=out}"`
	Bytes   uint64  `json:"bytes" metric:"peer_bytes_total{op=out}"`
	Seconds float64 `json:"seconds" metric:"peer_seconds_total{op=out}"`
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
	Peers         []AddressStats  // by address, at most ClientConfig.Peers and "other"
}

// AddressStats are the counters of one address.
type AddressStats struct {
	Peer    string          `json:"peer" label:"peer"`
	State   string          `json:"state"`           // up, idle (no connection), half-open, open (suspended)
	Error   string          `json:"error,omitempty"` // the last failure, unless the state is up
	Fetches int             `json:"fetches"`         // now
	Opened  uint64          `json:"breaker_opened"`  // times that it was suspended
	Blocks  uint64          `json:"blocks" metric:"peer_blocks_total{op=in}"`
	Bytes   uint64          `json:"bytes" metric:"peer_bytes_total{op=in}"`
	Seconds float64         `json:"seconds" metric:"peer_seconds_total{op=in}"`
	Failed  [Reasons]uint64 `json:"-"`
}

// maxTraffic bounds the hosts that a server counts apart.
const maxTraffic = 64

// other is the name under which peers beyond a limit are counted.
const other = "other"

type serverCounts struct {
	subscriptions                                                                   atomic.Int64
	accepted, refused, refusedPending, unauthenticated, lost, malformed, subscribed atomic.Uint64
	placed                                                                          atomic.Uint64
	ended                                                                           [ends]atomic.Uint64
	notSent                                                                         [Reasons]atomic.Uint64
}

// Stats returns the state and the counters.
func (s *Server) Stats() ServerStats {
	c := &s.count
	out := ServerStats{
		Subscriptions: int(c.subscriptions.Load()), Held: s.budget.taken(), Accepted: c.accepted.Load(),
		Refused: c.refused.Load(), RefusedPending: c.refusedPending.Load(),
		Unauthenticated: c.unauthenticated.Load(), Lost: c.lost.Load(), Malformed: c.malformed.Load(),
		Subscribed: c.subscribed.Load(), Placed: c.placed.Load(), Pinned: s.pinned.Load(), Peers: s.peers.list(),
	}
	for i := range c.ended {
		out.Ended[i] = c.ended[i].Load()
	}
	for i := range c.notSent {
		out.NotSent[i] = c.notSent[i].Load()
	}
	for _, p := range out.Peers {
		out.Blocks, out.Bytes, out.Seconds = out.Blocks+p.Blocks, out.Bytes+p.Bytes, out.Seconds+p.Seconds
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out.Connections, out.Pending = len(s.conns), len(s.pending)
	return out
}

// traffic counts what was sent, by host.
type traffic struct {
	mu   sync.Mutex
	host map[string]*HostTraffic
}

func (t *traffic) add(host string, blocks int, bytes int64, took time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.host[host]
	if p == nil {
		if len(t.host) >= maxTraffic {
			host = other
		}
		if p = t.host[host]; p == nil {
			if t.host == nil {
				t.host = map[string]*HostTraffic{}
			}
			p = &HostTraffic{Peer: host}
			t.host[host] = p
		}
	}
	p.Blocks, p.Bytes, p.Seconds = p.Blocks+uint64(blocks), p.Bytes+uint64(bytes), p.Seconds+took.Seconds()
}

func (t *traffic) list() []HostTraffic {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := []HostTraffic{}
	for _, p := range t.host {
		out = append(out, *p)
	}
	slices.SortFunc(out, func(a, b HostTraffic) int { return strings.Compare(a.Peer, b.Peer) })
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
