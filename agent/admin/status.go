package admin

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"os"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// Status is the contents of /status, for kvagent status and for tests. Names end in their units.
type Status struct {
	Version       string  `json:"version"`
	Boot          string  `json:"boot"` // hex
	PID           int     `json:"pid"`
	UptimeSeconds float64 `json:"uptime_seconds"`
	Ready         bool    `json:"ready"`
	Draining      bool    `json:"draining"`
	Problem       string  `json:"problem"` // why not live or not ready; empty: all well

	Engines  int `json:"engines"`
	Sessions int `json:"sessions"`
	Regions  int `json:"regions"`
	Jobs     int `json:"jobs"`

	Leases        int    `json:"leases"`
	LeaseBytes    int64  `json:"lease_bytes"`
	LeaseCap      int64  `json:"lease_cap_bytes"` // of one engine
	LeasesGiven   uint64 `json:"leases_given"`
	LeasesRevoked uint64 `json:"leases_revoked"`

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
	// The last one's Unix time when the agent read it, and the time it took. 0: there is none.
	LookupOverAt     float64 `json:"lookup_over_deadline_max_at_s"`
	LookupOverTookUS float64 `json:"lookup_over_deadline_max_took_us"`

	Sample SampleStatus  `json:"sample"`
	Stages []StageStatus `json:"stages"` // of jobs, by direction

	CleanupMaxMS float64     `json:"cleanup_max_ms"`
	Switches     SwitchState `json:"switches"`

	Pool       PoolStatus     `json:"pool"`
	EngineList []EngineStatus `json:"engine_list"`
	Sockets    []string       `json:"lookup_sockets"`
	Tiers      *TiersStatus   `json:"tiers,omitempty"` // nil: memory alone
	Movers     []MoverStatus  `json:"movers"`          // processes that have engines' memory open
	Orphans    Orphans        `json:"orphans"`

	Paces []PaceStatus `json:"paces"` // of each device

	Keep      KeepStatus      `json:"keep"`      // what single requests asked for
	Transfers TransfersStatus `json:"transfers"` // between engines
	Peers     PeersStatus     `json:"peers"`     // agents of other nodes
}

// PoolStatus is pool.Stats in JSON.
type PoolStatus struct {
	Capacity      int64         `json:"capacity_bytes"`
	Used          int64         `json:"used_bytes"`
	Pinned        int64         `json:"pinned_bytes"`
	Ready         int64         `json:"ready_bytes"` // populated so far
	IndexBytes    int64         `json:"index_bytes"`
	Entries       int64         `json:"entries"`
	Partial       int64         `json:"entries_partial"`
	PinnedEntries int64         `json:"entries_pinned"`
	Evicted       uint64        `json:"evicted"`
	EvictedBytes  uint64        `json:"evicted_bytes"`
	MovedBytes    uint64        `json:"moved_bytes"` // copied to other slots to free slabs
	Dropped       uint64        `json:"dropped"`
	Reassigned    uint64        `json:"slabs_reassigned"`
	Busy          uint64        `json:"busy"`
	BadPages      int64         `json:"bad_pages"` // cannot be read, and are not used any more
	BadPagesLimit int64         `json:"bad_pages_limit"`
	BadBytes      int64         `json:"bad_bytes"`
	BadBytesLimit int64         `json:"bad_bytes_limit"`
	BadDropped    uint64        `json:"bad_dropped"` // blocks
	FileFaults    uint64        `json:"file_faults"`
	Classes       []ClassStatus `json:"classes"`
	Owners        OwnersStatus  `json:"owners"`

	Eviction EvictionStatus `json:"eviction"`
}

// EvictionStatus compares the eviction policy with LRU in a pool of the same size. LRU itself has
// the name alone.
type EvictionStatus struct {
	Policy    string `json:"policy"`
	LookedUp  uint64 `json:"blocks_looked_up"`
	Hits      uint64 `json:"blocks_hit"`
	ShadowLRU uint64 `json:"blocks_hit_by_lru"`
	Alarms    uint64 `json:"alarms"`          // times that it lost too many hits to LRU
	Fallback  bool   `json:"fallback"`        // LRU decides, after an alarm
	Dropped   uint64 `json:"lookups_dropped"` // unknown to the policy, as its queue was full
}

// ClassStatus is one slot size of the pool.
type ClassStatus struct {
	SlotBytes int64 `json:"slot_bytes"`
	Slabs     int   `json:"slabs"`
	Slots     int   `json:"slots"`
	Used      int   `json:"used"`
}

func poolStatus(s *pool.Stats) PoolStatus {
	p := &s.Policy
	out := PoolStatus{
		Capacity: s.Capacity, Used: s.Used, Pinned: s.Pinned, Ready: s.Ready, IndexBytes: s.IndexBytes,
		Entries: s.Entries,
		Partial: s.Partial, PinnedEntries: s.PinnedEntries, Evicted: s.Evicted,
		EvictedBytes: s.EvictedBytes, MovedBytes: s.MovedBytes, Dropped: s.Dropped, Reassigned: s.Reassigned,
		Busy: s.Busy, BadPages: s.Bad.Pages, BadPagesLimit: s.Bad.MaxPages, BadBytes: s.Bad.Bytes,
		BadBytesLimit: s.Bad.MaxBytes, BadDropped: s.Bad.Dropped, FileFaults: s.Bad.Faults,
		Classes: make([]ClassStatus, len(s.Classes)), Owners: ownersStatus(&s.Owners),
		Eviction: EvictionStatus{Policy: p.Name, LookedUp: p.Lookups, Hits: p.Hits, ShadowLRU: p.ShadowHits,
			Alarms: p.Alarms, Fallback: p.Fallback, Dropped: p.LookupsDropped},
	}
	for i, c := range s.Classes {
		out.Classes[i] = ClassStatus{SlotBytes: c.SlotBytes, Slabs: c.Slabs, Slots: c.Slots, Used: c.Used}
	}
	return out
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
	Loads bool `json:"loads"`
	Saves bool `json:"saves"`
}

// Status returns the current contents of /status.
func (v *View) Status() Status {
	m, now := v.metrics, v.source.Snapshot()
	live, ready := v.source.Live(), v.source.Ready()
	st := Status{
		Version: now.Version, Boot: hex.EncodeToString(now.Boot[:]), PID: os.Getpid(),
		UptimeSeconds: time.Since(now.Since).Seconds(),
		Ready:         ready == nil, Draining: now.Draining, Sessions: now.Sessions, Regions: now.Regions,
		Jobs: now.Jobs, LeaseCap: now.LeaseCap, LeasesGiven: m.LeasesGiven.Load(),
		Leases: now.Leases, LeaseBytes: now.LeaseBytes, LeasesRevoked: now.LeasesRevoked,
		BlocksStored: now.Pool.Entries, BlocksSaved: m.saved[pool.OK].Load(), BlocksLoaded: m.loaded[pool.OK].Load(),
		BytesSaved: m.savedBytes.Load(), BytesLoaded: m.loadedBytes.Load(),
		Lookups: m.lookups.Load(), LookupHits: m.lookupHits.Load(), TokensAsked: m.tokensAsked.Load(),
		TokensFound: m.tokensFound.Load(),
		LookupMaxUS: m.lookupMax.micros(), LookupAskUS: m.AskMax.micros(),
		CleanupMaxMS: float64(m.CleanupMax.Load()) / float64(time.Millisecond),
		Switches:     now.Switches, Pool: poolStatus(&now.Pool), EngineList: v.source.Engines(), Sockets: now.Sockets,
		Movers: moverStatus(now.Movers), Sample: m.sampleStatus(now.VerifySample, now.LastMismatch),
		Stages:  m.Stages.status(),
		Orphans: now.Orphans, Paces: paceStatus(now.Paces),
		Tiers: tiersStatus(now.Tiers), Keep: v.keepStatus(&now.Keep), Transfers: v.transfersStatus(&now.Transfers),
		Peers: peersStatus(&now.Peers),
	}
	if late := m.worstLate.get(); late.over > 0 {
		st.LookupOverUS, st.LookupOverTookUS = microseconds(late.over), microseconds(late.took)
		st.LookupOverAt = float64(late.read.UnixMicro()) / 1e6
	}
	st.Engines = len(st.EngineList)
	if st.TokensAsked > 0 {
		st.HitRate = float64(st.TokensFound) / float64(st.TokensAsked)
	}
	if err := cmp.Or(live, ready); err != nil {
		st.Problem = err.Error()
	}
	return st
}

// MoverStatus is one process that has engines' memory open.
type MoverStatus struct {
	Name        string            `json:"name"`
	Device      string            `json:"device"`
	PID         int               `json:"pid"` // 0: no process
	Running     bool              `json:"running"`
	UpSeconds   float64           `json:"up_seconds"`
	Node        string            `json:"numa_node"` // node that it is bound to; empty: none
	Peers       int               `json:"peers"`
	Copies      int               `json:"copies"`
	PingAgeMS   int64             `json:"ping_age_ms"`
	Starts      uint64            `json:"starts"`
	Requests    uint64            `json:"requests"`
	Lost        map[string]uint64 `json:"lost"` // by reason
	LastLoss    string            `json:"last_loss"`
	Failing     bool              `json:"failing"`        // it was lost several times in a row
	Info        json.RawMessage   `json:"info,omitempty"` // the device's own report
	NextStartMS int64             `json:"next_start_ms"`  // until it may be started again
}

func moverStatus(movers []cudaipc.MoverState) []MoverStatus {
	out := []MoverStatus{}
	for _, m := range movers {
		st := MoverStatus{
			Name: m.Name, Device: m.Device, PID: m.Pid, Running: m.Pid != 0, Node: m.Node, Peers: m.Peers,
			Copies:    m.Copies,
			PingAgeMS: m.PingAge.Milliseconds(), Starts: m.Starts, Requests: m.Requests, Lost: make(map[string]uint64),
			Failing:     m.Failing,
			NextStartMS: max(time.Until(m.NextStart).Milliseconds(), 0),
		}
		if st.Running {
			st.UpSeconds = time.Since(m.Since).Seconds()
		}
		for _, reason := range cudaipc.LossReasons {
			st.Lost[string(reason)] = m.Lost[reason]
		}
		if json.Valid(m.Info) {
			st.Info = m.Info
		}
		if m.LastLoss != nil {
			st.LastLoss = m.LastLoss.Error()
		}
		out = append(out, st)
	}
	return out
}

// Orphans describes the movers of earlier agents of the socket directory.
type Orphans struct {
	Ended uint64 `json:"ended"` // movers that this agent ended, or that it saw end
	PIDs  []int  `json:"pids"`  // movers that cannot be ended: each keeps the memory of the engines that it served
	Cold  string `json:"cold"`  // why the pool's file was abandoned and the pool started empty; empty: it was not
}

// SampleStatus is the end-to-end check of a sample of the blocks that are copied.
type SampleStatus struct {
	Every uint32 `json:"every"` // one block in so many; 0: none
	// Blocks since the start.
	Saves        SampleCounts `json:"saves"`
	Loads        SampleCounts `json:"loads"`
	LastMismatch string       `json:"last_mismatch"` // empty: none
}

// SampleCounts are those of one direction.
type SampleCounts struct {
	Matched    uint64 `json:"matched"`
	Mismatched uint64 `json:"mismatched"` // the engine has other bytes than the pool
	Unverified uint64 `json:"unverified"` // not summed
}

func (c *SampleCounters) status() SampleCounts {
	return SampleCounts{c.matched.Load(), c.mismatched.Load(), c.unverified.Load()}
}

func (m *Metrics) sampleStatus(every uint32, lastMismatch string) SampleStatus {
	return SampleStatus{
		Every: every, Saves: m.Samples[transfer.Save].status(), Loads: m.Samples[transfer.Load].status(),
		LastMismatch: lastMismatch,
	}
}
