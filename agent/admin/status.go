package admin

import (
	"cmp"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/peer"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// Status is the agent's state: the contents of /status, and with the counters of Metrics all that
// /metrics has. The agent fills in all but what View.Status says. Names end in their units.
type Status struct {
	Version       string    `json:"version"`
	Boot          string    `json:"boot"` // hex
	PID           int       `json:"pid"`
	Since         time.Time `json:"-" metric:"start_time_seconds"`
	UptimeSeconds float64   `json:"uptime_seconds"`
	Ready         bool      `json:"ready"`
	Draining      bool      `json:"draining"`
	Problem       string    `json:"problem"` // why not live or not ready; empty: all well

	Engines           int `json:"engines"`
	EnginesComplete   int `json:"engines_complete" metric:"engines{ranks=all}"`
	EnginesIncomplete int `json:"engines_incomplete" metric:"engines{ranks=some}"`
	Sessions          int `json:"sessions" metric:"sessions"`
	Regions           int `json:"regions"`
	Jobs              int `json:"jobs" metric:"jobs"`
	// PendingFDs are descriptors of registrations that are not complete.
	PendingFDs int64 `json:"pending_descriptors"`
	// Stuck are workers whose current step is older than the limit.
	Stuck int `json:"workers_stuck" metric:"workers_stuck"`

	Leases        int    `json:"leases" metric:"leases"`
	LeaseBytes    int64  `json:"lease_bytes" metric:"lease_bytes"`
	LeaseCap      int64  `json:"lease_cap_bytes"` // of one engine
	LeasesGiven   uint64 `json:"leases_given"`
	LeasesRevoked uint64 `json:"leases_revoked" metric:"leases_total{event=revoked}"`

	BlocksStored int64  `json:"blocks_stored"` // entries in the pool now
	BlocksSaved  uint64 `json:"blocks_saved"`  // since the start, each shard counted
	BlocksLoaded uint64 `json:"blocks_loaded"`
	BytesSaved   uint64 `json:"bytes_saved"`
	BytesLoaded  uint64 `json:"bytes_loaded"`

	Lookups     uint64  `json:"lookups"`
	LookupHits  uint64  `json:"lookup_hits"`
	TokensAsked uint64  `json:"tokens_asked"`
	TokensFound uint64  `json:"tokens_found"`
	HitRate     float64 `json:"hit_rate"` // tokens found of tokens asked
	// Look-ups in kvagent's own form, since the start, timed from when the agent read them: the
	// longest, the longest wait for shared tiers, the greatest miss of a deadline.
	LookupMaxUS  float64 `json:"lookup_max_us"`
	LookupAskUS  float64 `json:"lookup_ask_max_us"`
	LookupOverUS float64 `json:"lookup_over_deadline_max_us"`
	// LookupFaults are malformed look-ups, by the reason; panic: the handler's; unsent: answers
	// that nobody took; connection: connections that were closed.
	LookupFaults map[string]uint64 `json:"lookup_faults" metric:"lookup_faults_total" label:"fault"`

	Sample SampleStatus  `json:"sample"`
	Stages []StageStatus `json:"stages"` // of jobs, by direction

	CleanupMaxMS float64     `json:"cleanup_max_ms"`
	Switches     SwitchState `json:"switches"`

	Pool       pool.Stats           `json:"pool"`
	EngineList []EngineStatus       `json:"engine_list"`
	Sockets    []string             `json:"lookup_sockets"`
	Tiers      *pool.TierReport     `json:"tiers,omitempty"` // nil: memory alone
	Movers     []cudaipc.MoverState `json:"movers"`
	Orphans    Orphans              `json:"orphans"`

	Paces []pace.Report `json:"paces"` // of each device

	Hints     HintStatus      `json:"hints"`           // what was told of how blocks will be used
	Events    events.Report   `json:"events"`          // KV events
	Transfers TransfersStatus `json:"transfers"`       // between engines
	Peers     *PeersStatus    `json:"peers,omitempty"` // agents of other nodes; nil: this one is on its own
}

// HintStatus is what was told of how blocks will be used.
type HintStatus struct {
	hints.Report
	Ignored uint64 `json:"ignored"` // of sessions without an open space
}

// TransfersStatus is what engines promise each other.
type TransfersStatus struct {
	delivery.Report
	Ignored uint64 `json:"ignored"` // messages of sessions without an open space
}

// EngineStatus is one engine.
type EngineStatus struct {
	Instance string `json:"instance"`
	Model    string `json:"model"`
	Space    string `json:"space"` // hex
	// Identity is the identity of the space; it shows why two engines do not share one.
	Identity   map[string]string `json:"identity"`
	Complete   bool              `json:"complete"`
	World      uint32            `json:"world"`
	Leases     int               `json:"leases"`
	LeaseBytes int64             `json:"lease_bytes"`
	Sessions   []WorkerStatus    `json:"sessions"`
}

// WorkerStatus is one session of an engine: its scheduler's, or a rank's.
type WorkerStatus struct {
	Session    uint64   `json:"session"`
	Role       string   `json:"role"`
	Rank       uint32   `json:"rank"`
	Shards     []uint32 `json:"shards"` // of each block that a worker holds
	PID        int      `json:"pid"`
	Software   string   `json:"software"`
	Version    uint32   `json:"protocol_version"`
	Registered bool     `json:"registered"`
	Regions    int      `json:"regions"`
	Jobs       int      `json:"jobs"`       // not reported yet
	SaveQueue  int      `json:"save_queue"` // jobs that wait
	LoadQueue  int      `json:"load_queue"`
	Outbox     int      `json:"outbox"`  // messages not written yet
	Step       string   `json:"step"`    // the worker's current step, or idle
	StepMS     int64    `json:"step_ms"` // for how long
}

// SwitchState tells whether loads and saves are switched on.
type SwitchState struct {
	Loads bool `json:"loads" metric:"switch{of=loads}"`
	Saves bool `json:"saves" metric:"switch{of=saves}"`
}

// Status returns the current contents of /status.
func (v *View) Status() Status {
	m, st := v.metrics, v.source.State()
	live, ready := v.source.Live(), v.source.Ready()
	st.PID, st.UptimeSeconds, st.Ready = os.Getpid(), time.Since(st.Since).Seconds(), ready == nil
	if err := cmp.Or(live, ready); err != nil {
		st.Problem = err.Error()
	}
	st.EngineList = v.source.Engines()
	st.EnginesIncomplete = st.Engines - st.EnginesComplete
	st.BlocksStored = st.Pool.Entries
	m.fill(&st)
	return st
}

// fill sets what the counters know.
func (m *Metrics) fill(st *Status) {
	st.LeasesGiven, st.Stages = m.LeasesGiven.Load(), m.Stages.status()
	st.BlocksSaved, st.BlocksLoaded = m.saved[pool.OK].Load(), m.loaded[pool.OK].Load()
	st.BytesSaved, st.BytesLoaded = m.SavedBytes.Load(), m.LoadedBytes.Load()
	st.Lookups, st.LookupHits = m.lookups(), m.LookupHits.Load()
	st.TokensAsked, st.TokensFound = m.TokensAsked.Load(), m.TokensFound.Load()
	if st.TokensAsked > 0 {
		st.HitRate = float64(st.TokensFound) / float64(st.TokensAsked)
	}
	st.LookupMaxUS, st.LookupAskUS = m.lookupMax.micros(), m.AskMax.micros()
	st.LookupOverUS = m.overMax.micros()
	st.CleanupMaxMS = float64(m.CleanupMax.Load()) / float64(time.Millisecond)
	st.Sample.Saves, st.Sample.Loads = m.Samples[transfer.Save].status(), m.Samples[transfer.Load].status()
	st.Hints.Ignored, st.Transfers.Ignored = m.HintsIgnored.Load(), m.TransfersIgnored.Load()
}

// Orphans describes the movers of earlier agents of the socket directory.
type Orphans struct {
	Ended uint64 `json:"ended"` // movers that this agent ended, or that it saw end
	// PIDs are movers that cannot be ended: each keeps the memory of the engines that it served.
	PIDs []int `json:"pids" metric:"orphan_movers"`
	// Cold is why the pool's file was abandoned and the pool started empty; empty: it was not.
	Cold string `json:"cold" metric:"pool_file_abandoned"`
}

// SampleStatus is the end-to-end check of a sample of the blocks that are copied.
type SampleStatus struct {
	Every uint32 `json:"every"` // one block in so many; 0: none
	// Blocks since the start.
	Saves        transfer.SampleCounts `json:"saves"`
	Loads        transfer.SampleCounts `json:"loads"`
	LastMismatch string                `json:"last_mismatch"` // empty: none
}

// Reads are one-sided reads of other agents' memory.
type Reads struct {
	Protocol string // empty: none were configured
	Reason   error  // why there are none now; nil: there are
}

// PeersStatus is what an agent knows of those of other nodes.
type PeersStatus struct {
	Address string `json:"address"`

	Blocks  uint64              `json:"blocks_fetched"`
	Bytes   uint64              `json:"bytes_fetched"`
	Ended   map[string]uint64   `json:"fetches_ended" metric:"peer_fetches_ended_total" label:"end"`
	Failed  map[string]uint64   `json:"blocks_failed" metric:"peer_blocks_failed_total" label:"reason"`
	Fetched []peer.AddressStats `json:"fetched_from"`

	Connections     int                `json:"connections" metric:"peer_connections"` // of other agents
	Unauthenticated uint64             `json:"unauthenticated" metric:"peer_unauthenticated_total"`
	Subscriptions   int                `json:"subscriptions"`
	BlocksSent      uint64             `json:"blocks_sent"` // each shard counted
	BytesSent       uint64             `json:"bytes_sent"`
	Sent            []peer.HostTraffic `json:"sent_to"`

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
		Blocks: c.Blocks, Bytes: c.Bytes, Ended: map[string]uint64{}, Failed: map[string]uint64{},
		Fetched: c.Peers, Connections: s.Connections, Unauthenticated: s.Unauthenticated,
		Subscriptions: s.Subscriptions, BlocksSent: s.Blocks, BytesSent: s.Bytes, Sent: s.Peers,
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
	if p := v.source.State().Peers; p != nil {
		address = p.Address
	}
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
