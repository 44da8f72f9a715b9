package admin

import (
	"strconv"
	"strings"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/pool/peer"
)

// Peers is what an agent knows of those of other nodes. An agent on its own has the zero value.
type Peers struct {
	Address string // where other agents reach this one; empty: they cannot
	Client  peer.ClientStats
	Server  peer.ServerStats
	Reads   Reads
}

// Reads are one-sided reads of other agents' memory.
type Reads struct {
	Protocol string // empty: none were configured
	Reason   error  // why there are none now; nil: there are
}

// TransfersStatus is delivery.Report in JSON.
type TransfersStatus struct {
	Open      int    `json:"open"`
	Complete  int    `json:"complete"`
	Waiting   int    `json:"waiting"` // transfers for which the last look-up was told to wait
	Opened    uint64 `json:"opened"`
	Completed uint64 `json:"completed"`
	Delivered uint64 `json:"delivered"`
	Expired   uint64 `json:"expired"`
	Abandoned uint64 `json:"abandoned"` // open when their session ended
	Displaced uint64 `json:"displaced"` // complete, and ended for a newer one
	Refused   uint64 `json:"refused"`   // too many
	Ignored   uint64 `json:"ignored"`   // messages of sessions without an open space
	Waited    uint64 `json:"waited"`    // answers to look-ups that said to wait

	Fetching         int    `json:"fetching"`
	Fetches          uint64 `json:"fetches"`
	FetchesFailed    uint64 `json:"fetches_failed"`
	FetchesCancelled uint64 `json:"fetches_cancelled"`
	FetchesRefused   uint64 `json:"fetches_refused"`
}

func (v *View) transfersStatus(r *delivery.Report) TransfersStatus {
	return TransfersStatus{
		Open: r.Open, Complete: r.Complete, Waiting: r.Waiting, Opened: r.Opened, Completed: r.Completed,
		Delivered: r.Delivered, Expired: r.Expired, Abandoned: r.Abandoned, Displaced: r.Displaced, Refused: r.Refused,
		Ignored: v.metrics.TransfersIgnored.Load(), Waited: r.Waited,
		Fetching: r.Fetching, Fetches: r.Fetches, FetchesFailed: r.FetchesFailed, FetchesCancelled: r.FetchesCancelled,
		FetchesRefused: r.FetchesRefused,
	}
}

// PeersStatus is Peers in JSON.
type PeersStatus struct {
	Address string `json:"address"`

	Blocks  uint64            `json:"blocks_fetched"`
	Bytes   uint64            `json:"bytes_fetched"`
	Ended   map[string]uint64 `json:"fetches_ended"` // by how
	Failed  map[string]uint64 `json:"blocks_failed"` // by reason
	Fetched []PeerStatus      `json:"fetched_from"`

	Connections     int          `json:"connections"` // of other agents
	Unauthenticated uint64       `json:"unauthenticated"`
	Subscriptions   int          `json:"subscriptions"`
	BlocksSent      uint64       `json:"blocks_sent"` // each shard counted
	BytesSent       uint64       `json:"bytes_sent"`
	Sent            []SentStatus `json:"sent_to"`

	Reads *ReadsStatus `json:"reads,omitempty"` // nil: no --peer-rdma
}

// ReadsStatus are one-sided reads of other agents' memory.
type ReadsStatus struct {
	Protocol string `json:"protocol"`
	State    string `json:"state"`           // up, down
	Error    string `json:"error,omitempty"` // why it is down
	Blocks   uint64 `json:"blocks"`          // that came by them, each shard counted
	Bytes    uint64 `json:"bytes"`
	Failed   uint64 `json:"failed"`       // reads whose blocks came in frames
	Placed   uint64 `json:"placed"`       // shards of blocks that others read
	Pinned   int64  `json:"pinned_bytes"` // for reads of others, now
}

// PeerStatus is one agent that blocks are fetched from.
type PeerStatus struct {
	Peer    string  `json:"peer"`
	State   string  `json:"state"`
	Error   string  `json:"error,omitempty"`
	Fetches int     `json:"fetches"` // now
	Blocks  uint64  `json:"blocks"`
	Bytes   uint64  `json:"bytes"`
	Seconds float64 `json:"seconds"`
	Opened  uint64  `json:"breaker_opened"`
}

// SentStatus is one host that blocks are sent to.
type SentStatus struct {
	Peer    string  `json:"peer"`
	Blocks  uint64  `json:"blocks"`
	Bytes   uint64  `json:"bytes"`
	Seconds float64 `json:"seconds"`
}

func peersStatus(p *Peers) PeersStatus {
	c, s := &p.Client, &p.Server
	out := PeersStatus{
		Address: p.Address, Blocks: c.Blocks, Bytes: c.Bytes, Ended: map[string]uint64{}, Failed: map[string]uint64{},
		Fetched: []PeerStatus{}, Connections: s.Connections, Unauthenticated: s.Unauthenticated,
		Subscriptions: s.Subscriptions, BlocksSent: s.Blocks, BytesSent: s.Bytes, Sent: []SentStatus{},
	}
	for end, n := range c.Done {
		if name := peer.End(end).String(); name != "" {
			out.Ended[name] = n
		}
	}
	for reason, n := range c.Failed {
		out.Failed[peer.Reason(reason).String()] = n
	}
	for i := range c.Peers {
		one := &c.Peers[i]
		out.Fetched = append(out.Fetched, PeerStatus{
			Peer: one.Peer, State: one.State, Error: one.Error, Fetches: one.Fetches, Blocks: one.Blocks,
			Bytes: one.Bytes, Seconds: one.Seconds, Opened: one.Opened,
		})
	}
	for _, one := range s.Peers {
		out.Sent = append(out.Sent, SentStatus{Peer: one.Peer, Blocks: one.Blocks, Bytes: one.Bytes,
			Seconds: one.Seconds})
	}
	if p.Reads.Protocol != "" {
		out.Reads = readsStatus(p)
	}
	return out
}

func readsStatus(p *Peers) *ReadsStatus {
	out := &ReadsStatus{
		Protocol: p.Reads.Protocol, State: "up", Blocks: p.Client.Read, Bytes: p.Client.ReadBytes,
		Failed: p.Client.ReadsFailed, Placed: p.Server.Placed, Pinned: p.Server.Pinned,
	}
	if p.Reads.Reason != nil {
		out.State, out.Error = "down", p.Reads.Reason.Error()
	}
	return out
}

// bootstrapEngine is one engine in the answer to GET /query.
type bootstrapEngine struct {
	EngineID   string            `json:"engine_id"`
	WorkerAddr map[string]string `json:"worker_addr"`
}

// bootstrap answers GET /query as the bootstrap server of vLLM's Mooncake connector does, for its
// proxy: one engine as number 0, or the ranks of a data-parallel one. Of several engines the one
// with most ranks is named, because the proxy sends requests to each number's rank; what it passes
// on is the same for all: after the last @ of an engine_id, this agent's address for other agents.
func (v *View) bootstrap() map[string]bootstrapEngine {
	address, most := v.source.Snapshot().Peers.Address, map[string]bootstrapEngine{}
	engines := map[string]map[string]bootstrapEngine{}
	for _, e := range v.source.Engines() {
		if !e.Complete {
			continue
		}
		name, rank := dataParallelRank(e.Instance)
		ranks := engines[name]
		if ranks == nil {
			ranks = map[string]bootstrapEngine{}
			engines[name] = ranks
		}
		ranks[rank] = bootstrapEngine{e.Instance + "@" + address, map[string]string{}}
		if len(ranks) > len(most) {
			most = ranks
		}
	}
	return most
}

// dataParallelRank splits the name that vLLM gives to a rank of a data-parallel engine.
func dataParallelRank(instance string) (name, rank string) {
	if name, rank, ok := strings.Cut(instance, "_dp"); ok {
		if _, err := strconv.ParseUint(rank, 10, 16); err == nil {
			return name, rank
		}
	}
	return instance, "0"
}
