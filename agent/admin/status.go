package admin

import (
	"strconv"
	"strings"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/pool/peer"
)

// Status is the agent's state: the contents of /status, and with the counters of report.Metrics all
// that /metrics has.
type Status struct {
	report.Status
	Guests
}

// Guests are the parts of /status that the core has not.
type Guests struct {
	Hints     hints.Report    `json:"hints"`           // what was told of how blocks will be used
	Events    events.Report   `json:"events"`          // KV events
	Transfers delivery.Report `json:"transfers"`       // what engines promise each other
	Peers     *PeersStatus    `json:"peers,omitempty"` // agents of other nodes; nil: this one is on its own
}

// Status returns the current contents of /status.
func (v *View) Status() Status { return Status{v.agent.Status(), v.source.Guests()} }

// Reads are one-sided reads of other agents' memory.
type Reads struct {
	Protocol string // empty: none were configured
	Reason   error  // why there are none now; nil: there are
}

// PeersStatus is what an agent knows of those of other nodes.
type PeersStatus struct {
	Address string `json:"address"`

	Blocks  uint64              `json:"blocks_fetched" metric:"peer_blocks_total{op=in}"`
	Bytes   uint64              `json:"bytes_fetched" metric:"peer_bytes_total{op=in}"`
	Seconds float64             `json:"seconds_fetching" metric:"peer_seconds_total{op=in}"`
	Ended   map[string]uint64   `json:"fetches_ended" metric:"peer_fetches_ended_total" label:"end"`
	Failed  map[string]uint64   `json:"blocks_failed" metric:"peer_blocks_failed_total" label:"reason"`
	Fetched []peer.AddressStats `json:"fetched_from"`

	Connections     int     `json:"connections" metric:"peer_connections"` // of other agents
	Unauthenticated uint64  `json:"unauthenticated" metric:"peer_unauthenticated_total"`
	Subscriptions   int     `json:"subscriptions"`
	BlocksSent      uint64  `json:"blocks_sent" metric:"peer_blocks_total{op=out}"` // each shard counted
	BytesSent       uint64  `json:"bytes_sent" metric:"peer_bytes_total{op=out}"`
	SecondsSent     float64 `json:"seconds_sending" metric:"peer_seconds_total{op=out}"`

	Reads *ReadsStatus `json:"reads,omitempty"` // nil: no --peer-rdma
}

// ReadsStatus are one-sided reads of other agents' memory.
type ReadsStatus struct {
	Protocol string `json:"protocol"`
	State    string `json:"state"` // up, down
	Up       bool   `json:"-" metric:"peer_reads_up"`
	Error    string `json:"error,omitempty"` // why it is down
	Blocks   uint64 `json:"blocks"`          // that came by them, each shard counted
	Bytes    uint64 `json:"bytes"`
	Failed   uint64 `json:"failed" metric:"peer_reads_failed_total"` // their blocks came in frames
	Placed   uint64 `json:"placed"`                                  // shards of blocks that others read
	Pinned   int64  `json:"pinned_bytes"`                            // for reads of others, now
}

// NewPeersStatus makes it of what both sides count. Address is not set.
func NewPeersStatus(c *peer.ClientStats, s *peer.ServerStats, r Reads) *PeersStatus {
	out := &PeersStatus{
		Blocks: c.Blocks, Bytes: c.Bytes, Seconds: c.Seconds, Ended: map[string]uint64{}, Failed: map[string]uint64{},
		Fetched: c.Peers, Connections: s.Connections, Unauthenticated: s.Unauthenticated,
		Subscriptions: s.Subscriptions, BlocksSent: s.Blocks, BytesSent: s.Bytes, SecondsSent: s.Seconds,
	}
	for end, n := range c.Done {
		if name := peer.End(end).String(); name != "" {
			out.Ended[name] = n
		}
	}
	for reason, n := range c.Failed {
		out.Failed[peer.Reason(reason).String()] = n
	}
	if r.Protocol == "" {
		return out
	}
	out.Reads = &ReadsStatus{
		Protocol: r.Protocol, State: "up", Up: r.Reason == nil, Blocks: c.Read, Bytes: c.ReadBytes,
		Failed: c.ReadsFailed, Placed: s.Placed, Pinned: s.Pinned,
	}
	if r.Reason != nil {
		out.Reads.State, out.Reads.Error = "down", r.Reason.Error()
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
	address, most := "", map[string]bootstrapEngine{}
	if p := v.source.Guests().Peers; p != nil {
		address = p.Address
	}
	engines := map[string]map[string]bootstrapEngine{}
	for _, e := range v.agent.Status().EngineList {
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
