// Package admin serves the agent's operator over HTTP: status, metrics, health, stored contents,
// and the switches. It holds no state of the agent: each answer is made from snapshots that the
// agent returns.
package admin

import (
	"time"

	"github.com/kvagent/kvagent/agent/delivery"
	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/agent/keep"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer/pace"
)

// Source is the agent as package admin reads it. Its functions may be called from any goroutine
// until the server is closed.
type Source struct {
	Snapshot func() Snapshot
	Engines  func() []EngineStatus // by name
	Spaces   func() []Space
	Live     func() error // why the agent must be restarted; nil: it is alive
	Ready    func() error // why it does not serve; nil: it does
	// Set switches loads and saves; nil leaves one as it is.
	Set func(loads, saves *bool) SwitchState
	// Reset starts a new weights epoch of a space and returns its new state. stored is false if
	// nothing of it is stored.
	Reset func(fp pool.Fingerprint) (now CacheSpace, stored bool, err error)
	Tiers pool.TierContents // nil: no tier can be listed
	Tail  func(follow bool, wants func(pool.SpaceID) bool) (*events.Tail, error)
}

// Snapshot is the agent's state at one moment. Sizes are in bytes.
type Snapshot struct {
	Version string
	Boot    [16]byte
	Since   time.Time // start

	Draining bool
	Switches SwitchState

	Sessions, Regions, Jobs  int
	Engines, EnginesComplete int
	Stuck                    int // workers whose current step is older than the limit
	PendingFDs               int64

	Leases        int
	LeaseBytes    int64
	LeaseCap      int64 // of one engine
	LeasesRevoked uint64

	Sockets []string           // look-up sockets that are open, sorted
	Lookups ipc.LookupCounters // of all look-up sockets there have been

	Pool    pool.Stats
	Tiers   *pool.TierReport // nil: memory alone
	Movers  []cudaipc.MoverState
	Orphans Orphans

	Paces []pace.DeviceReport // of each device

	Keep      keep.Report
	Events    events.Report
	Transfers delivery.Report
	Peers     Peers

	VerifySample uint32 // one block in so many is checked end to end; 0: none
	LastMismatch string // empty: none
}

// Space is a space that the agent knows.
type Space struct {
	Fingerprint pool.Fingerprint
	CacheSpace
}

// View combines the agent's snapshots and its counters.
type View struct {
	source  Source
	metrics *Metrics
}

// NewView makes a view of an agent, and registers gauges made from its snapshots with its metrics.
func NewView(s Source, m *Metrics) *View {
	v := &View{source: s, metrics: m}
	m.registry.MustRegister(&gauges{v})
	return v
}
