package report

import (
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// Status is the state of the agent's core. Names end in their units.
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
	// Stuck are workers whose current step is older than the limit.
	Stuck int `json:"workers_stuck" metric:"workers_stuck"`

	Leases        int    `json:"leases" metric:"leases"`
	LeaseBytes    int64  `json:"lease_bytes" metric:"lease_bytes"`
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
	// longest, the greatest miss of a deadline.
	LookupMaxUS  float64 `json:"lookup_max_us"`
	LookupOverUS float64 `json:"lookup_over_deadline_max_us"`
	// LookupFaults are malformed look-ups; unsent: answers
	// that nobody took; connection: connections that were closed.
	LookupFaults map[string]uint64 `json:"lookup_faults" metric:"lookup_faults_total" label:"fault"`

	Sample SampleStatus `json:"sample"`

	CleanupMaxMS float64     `json:"cleanup_max_ms"`
	Switches     SwitchState `json:"switches"`

	Pool       pool.Stats           `json:"pool"`
	EngineList []EngineStatus       `json:"engine_list"`
	Tiers      *pool.TierReport     `json:"tiers,omitempty"` // nil: memory alone
	Movers     []cudaipc.MoverState `json:"movers"`
	// Abandoned is why the pool's file was abandoned and the pool started empty; empty: it was not.
	Abandoned string `json:"pool_file_abandoned,omitempty" metric:"pool_file_abandoned"`

	Paces []pace.Report `json:"paces"` // of each device
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

// Fill sets what the counters know.
func (m *Metrics) Fill(st *Status) {
	st.LeasesGiven = m.LeasesGiven.Load()
	st.BlocksSaved, st.BlocksLoaded = m.saved[pool.OK].Load(), m.loaded[pool.OK].Load()
	st.BytesSaved, st.BytesLoaded = m.SavedBytes.Load(), m.LoadedBytes.Load()
	st.Lookups, st.LookupHits = m.lookups(), m.LookupHits.Load()
	st.TokensAsked, st.TokensFound = m.TokensAsked.Load(), m.TokensFound.Load()
	if st.TokensAsked > 0 {
		st.HitRate = float64(st.TokensFound) / float64(st.TokensAsked)
	}
	st.LookupMaxUS, st.LookupOverUS = m.lookupMax.micros(), m.overMax.micros()
	st.CleanupMaxMS = float64(m.CleanupMax.Load()) / float64(time.Millisecond)
	st.Sample.Saves, st.Sample.Loads = m.Samples[transfer.Save].status(), m.Samples[transfer.Load].status()
}

// SampleStatus is the end-to-end check of a sample of the blocks that are copied.
type SampleStatus struct {
	Every uint32 `json:"every"` // one block in so many; 0: none
	// Blocks since the start.
	Saves        transfer.SampleCounts `json:"saves"`
	Loads        transfer.SampleCounts `json:"loads"`
	LastMismatch string                `json:"last_mismatch"` // empty: none
}

// Space is a space that the agent knows.
type Space struct {
	Fingerprint pool.Fingerprint
	CacheSpace
	Identity     map[string]string // not to be changed
	HashTokens   uint32
	Descriptions []ipc.GroupDesc // of the groups
}

// CacheSpace is one space this agent knows.
type CacheSpace struct {
	Space   string `json:"space"` // hex
	Model   string `json:"model"`
	Tenant  string `json:"tenant"`
	Dtype   string `json:"dtype"`
	Groups  int    `json:"groups"`
	Shards  int    `json:"shards"`
	Open    bool   `json:"open"` // all shards' sizes are known, so that something can be stored
	Epoch   uint32 `json:"epoch"`
	Engines int    `json:"engines"` // complete ones
	Blocks  int64  `json:"blocks"`  // in memory; -1: the pool does not count them by space

	ID pool.SpaceID `json:"-"` // unless Blocks is -1
}
