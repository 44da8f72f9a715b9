package agent

import (
	"cmp"
	"encoding/hex"
	"os"
	"slices"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Status is what /status says: for kvagent status, and for tests. Bytes are bytes, times what their names say.
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
	// Of look-ups in kvagent's own form, since the start, from when the agent read them: the longest, the longest wait for shared tiers, the farthest beyond its deadline.
	LookupMaxUS  float64 `json:"lookup_max_us"`
	LookupAskUS  float64 `json:"lookup_ask_max_us"`
	LookupOverUS float64 `json:"lookup_over_deadline_max_us"`
	// Of the latter: when the agent read it, Unix time, and what it took. 0: there is none.
	LookupOverAt     float64 `json:"lookup_over_deadline_max_at_s"`
	LookupOverTookUS float64 `json:"lookup_over_deadline_max_took_us"`

	Sample SampleStatus `json:"sample"`

	CleanupMaxMS float64     `json:"cleanup_max_ms"`
	Switches     SwitchState `json:"switches"`

	Pool       PoolStatus     `json:"pool"`
	EngineList []EngineStatus `json:"engine_list"`
	Sockets    []string       `json:"lookup_sockets"`
	Tiers      *TiersStatus   `json:"tiers,omitempty"` // nil: memory alone
	Movers     []MoverStatus  `json:"movers"`          // processes that have engines' memory open
	LeftBehind LeftBehind     `json:"left_behind"`
}

// PoolStatus is the pool's: its Stats, as JSON names things.
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
}

// ClassStatus is one slot size of the pool.
type ClassStatus struct {
	SlotBytes int64 `json:"slot_bytes"`
	Slabs     int   `json:"slabs"`
	Slots     int   `json:"slots"`
	Used      int   `json:"used"`
}

func poolStatus(s *pool.Stats) PoolStatus {
	out := PoolStatus{
		Capacity: s.Capacity, Used: s.Used, Pinned: s.Pinned, Ready: s.Ready, IndexBytes: s.IndexBytes, Entries: s.Entries,
		Partial: s.Partial, PinnedEntries: s.PinnedEntries, Evicted: s.Evicted,
		EvictedBytes: s.EvictedBytes, MovedBytes: s.MovedBytes, Dropped: s.Dropped, Reassigned: s.Reassigned,
		Busy: s.Busy, BadPages: s.Bad.Pages, BadPagesLimit: s.Bad.MaxPages, BadBytes: s.Bad.Bytes,
		BadBytesLimit: s.Bad.MaxBytes, BadDropped: s.Bad.Dropped, FileFaults: s.Bad.Faults,
		Classes: make([]ClassStatus, len(s.Classes)),
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
	// Identity is what the space is made of, so that people see why two engines do not share.
	Identity   map[string]string `json:"identity"`
	Complete   bool              `json:"complete"`
	World      uint32            `json:"world"`
	Leases     int               `json:"leases"`
	LeaseBytes int64             `json:"lease_bytes"`
	Sessions   []WorkerStatus    `json:"sessions"`
}

// WorkerStatus is one session of an engine: its scheduler's, or a rank's.
type WorkerStatus struct {
	Session    uint64 `json:"session"`
	Role       string `json:"role"`
	Rank       uint32 `json:"rank"`
	Shard      uint32 `json:"shard"`
	PID        int    `json:"pid"`
	Software   string `json:"software"`
	Version    uint32 `json:"protocol_version"`
	Registered bool   `json:"registered"`
	Regions    int    `json:"regions"`
	Jobs       int    `json:"jobs"`       // not reported yet
	SaveQueue  int    `json:"save_queue"` // jobs that wait
	LoadQueue  int    `json:"load_queue"`
	Outbox     int    `json:"outbox"`  // messages not written yet
	Step       string `json:"step"`    // what the worker does now, or idle
	StepMS     int64  `json:"step_ms"` // for how long
}

// Status is a snapshot of the agent.
func (a *Agent) Status() Status {
	m, stats := a.metrics, a.pool.Stats()
	st := Status{
		Version: a.cfg.Version, Boot: hex.EncodeToString(a.boot[:]), PID: os.Getpid(), UptimeSeconds: time.Since(a.since).Seconds(),
		Ready: a.Ready() == nil, Draining: a.draining(), Sessions: len(a.sessions.all()), Regions: a.mappings.open(),
		Jobs: a.inflight.count(), LeaseCap: a.cfg.LeaseBytes, LeasesGiven: m.leasesGiven.Load(),
		BlocksStored: stats.Entries, BlocksSaved: m.saved[pool.OK].Load(), BlocksLoaded: m.loaded[pool.OK].Load(),
		BytesSaved: m.savedBytes.Load(), BytesLoaded: m.loadedBytes.Load(),
		Lookups: m.lookups.Load(), LookupHits: m.lookupHits.Load(), TokensAsked: m.tokensAsked.Load(), TokensFound: m.tokensFound.Load(),
		LookupMaxUS: m.lookupMax.micros(), LookupAskUS: m.askMax.micros(),
		CleanupMaxMS: float64(m.cleanupMax.Load()) / float64(time.Millisecond),
		Switches:     a.switches.state(), Pool: poolStatus(&stats), EngineList: a.engines(), Sockets: a.sockets.names(),
		Movers: a.moverStatus(), Sample: a.sampleStatus(), LeftBehind: a.leftBehind(),
	}
	if late := m.latest.get(); late.over > 0 {
		st.LookupOverUS, st.LookupOverTookUS = microseconds(late.over), microseconds(late.took)
		st.LookupOverAt = float64(late.read.UnixMicro()) / 1e6
	}
	st.Tiers = tiersStatus(a.tiers)
	st.Engines = len(st.EngineList)
	st.Leases, st.LeaseBytes, st.LeasesRevoked = a.ledger.Totals()
	if st.TokensAsked > 0 {
		st.HitRate = float64(st.TokensFound) / float64(st.TokensAsked)
	}
	if err := cmp.Or(a.Live(), a.Ready()); err != nil {
		st.Problem = err.Error()
	}
	return st
}

// engines are the engines that are here, by name.
func (a *Agent) engines() []EngineStatus {
	a.registry.mu.Lock()
	defer a.registry.mu.Unlock()
	out := make([]EngineStatus, 0, len(a.registry.engines))
	for _, e := range a.registry.engines {
		es := EngineStatus{
			Instance: e.instance, Model: e.space.model, Space: hex.EncodeToString(e.space.fp[:]), Identity: e.space.says,
			Complete: e.complete.Load(), World: e.world, Sessions: []WorkerStatus{},
		}
		es.Leases, es.LeaseBytes, _ = a.ledger.Usage(e.acct)
		for _, st := range append([]*seat{e.scheduler}, e.ranks...) {
			if st != nil {
				es.Sessions = append(es.Sessions, st.status())
			}
		}
		out = append(out, es)
	}
	slices.SortFunc(out, func(x, y EngineStatus) int { return cmp.Compare(x.Instance, y.Instance) })
	return out
}

// status of a seat; registry.mu is held.
func (st *seat) status() WorkerStatus {
	s := st.session
	ws := WorkerStatus{
		Session: s.number, Role: "worker", Rank: st.rank, Shard: st.shard, PID: s.pid, Software: s.software,
		Version: s.conn.Version(), Registered: st.registered, Jobs: s.jobs.count(), Outbox: s.out.depth(), Step: "idle",
	}
	if st.role == ipc.RoleScheduler {
		ws.Role = "scheduler"
	}
	if st.registered {
		ws.Regions = st.regions
	}
	if w := st.worker.Load(); w != nil {
		state := w.State()
		ws.SaveQueue, ws.LoadQueue = state.Save.Queue, state.Load.Queue
	}
	if step, age := st.step(); step != "" {
		ws.Step, ws.StepMS = step, age.Milliseconds()
	}
	return ws
}
