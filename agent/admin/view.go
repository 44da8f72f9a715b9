// Package admin serves the agent's operator over HTTP: status, metrics, health, stored contents,
// and the switches. It holds no state of the agent: each answer is made from snapshots that the
// agent returns.
package admin

import (
	"github.com/kvagent/kvagent/agent/events"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/pool"
)

// Source is the agent as package admin reads it. Its functions may be called from any goroutine
// until the server is closed.
type Source struct {
	State   func() Status         // at one moment, without what View.Status adds
	Engines func() []EngineStatus // by name
	Spaces  func() []Space
	Live    func() error // why the agent must be restarted; nil: it is alive
	Ready   func() error // why it does not serve; nil: it does
	// Set switches loads and saves; nil leaves one as it is.
	Set func(loads, saves *bool) SwitchState
	// Reset starts a new weights epoch of a space and returns its new state. stored is false if
	// nothing of it is stored.
	Reset func(fp pool.Fingerprint) (now CacheSpace, stored bool, err error)
	Tiers pool.TierContents // nil: no tier can be listed
	// Explain tells why look-ups missed; nil: nothing is remembered.
	Explain *history.World
	Hints   Hints
	Tail    func(follow bool, wants func(pool.SpaceID) bool) (*events.Tail, error)
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

// NewView makes a view of an agent, and registers what its state says with its metrics.
func NewView(s Source, m *Metrics) *View {
	v := &View{source: s, metrics: m}
	m.registry.MustRegister(&collector{v})
	return v
}
