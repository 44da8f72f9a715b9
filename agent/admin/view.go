// Package admin serves the agent's operator over HTTP: status, metrics, health, stored contents,
// and the switches. It holds no state of the agent: each answer is made from snapshots that the
// agent returns.
package admin

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/kvagent/kvagent/agent/hints"
	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/agent/page"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/pool"
)

// Agent is the agent's core as package admin reads it, from any goroutine.
type Agent interface {
	Status() report.Status
	Metrics() *report.Metrics
	Spaces() []report.Space
	Live() error  // why the agent must be restarted; nil: it is alive
	Ready() error // why it does not serve; nil: it does
	// Set switches loads and saves; nil leaves one as it is.
	Set(loads, saves *bool) report.SwitchState
	// ResetStored starts a new weights epoch of a space and returns its new state. stored is false
	// if nothing of it is stored.
	ResetStored(fp pool.Fingerprint) (now report.CacheSpace, stored bool, err error)
}

// Sources are what else a view reads.
type Sources struct {
	Guests func() Guests
	// Explain tells why look-ups missed; nil: nothing is remembered.
	Explain *history.World
	Hints   *hints.Ledger
}

// View combines what the agent and its guests tell.
type View struct {
	agent  Agent
	source Sources
}

// NewView makes a view of an agent, and registers what its state says with its metrics.
func NewView(a Agent, s Sources) *View {
	v := &View{agent: a, source: s}
	a.Metrics().MustRegister(&collector{v})
	return v
}

// pageLookups is the number of look-ups that the page shows.
const pageLookups = 20

// pageSource returns the functions by which the page reads the agent.
func (v *View) pageSource() page.Source {
	source := page.Source{Sample: v.sample}
	if world := v.source.Explain; world != nil {
		source.Explain = func() (reasons, lookups any) {
			r := world.Recent(pageLookups)
			return totals{r.Since, r.Reasons}, r.Lookups
		}
	}
	return source
}

// totals are why look-ups found no more, without naming one.
type totals struct {
	Since   time.Time        `json:"since"`
	Reasons []history.Reason `json:"reasons"`
}

// sample returns a point of the charts, and the status without identities, which are long.
func (v *View) sample() (page.Point, any) {
	st := v.Status()
	for i := range st.EngineList {
		st.EngineList[i].Identity = nil
	}
	eviction := &st.Pool.Policy
	p := page.Point{
		Lookups: st.Lookups, TokensAsked: st.TokensAsked, TokensFound: st.TokensFound,
		Blocks: eviction.Lookups, BlocksHit: eviction.Hits,
		BlocksUnlimited: eviction.Hits + eviction.Beyond,
		SlowestUS:       v.agent.Metrics().LookupRecent.Take(),
		Loaded:          st.BytesLoaded, Saved: st.BytesSaved, Engines: st.Engines,
		Complete: st.EnginesComplete, Used: st.Pool.Used, Pinned: st.Pool.Pinned, Capacity: st.Pool.Capacity,
		Tiers: [][2]uint64{},
	}
	if st.Tiers != nil {
		for i := range st.Tiers.Tiers {
			t := &st.Tiers.Tiers[i]
			p.Tiers = append(p.Tiers, [2]uint64{t.BytesIn, t.BytesOut})
		}
	}
	return p, &st
}

// MaxRecent bounds the look-ups in one answer of /explain.
const MaxRecent = history.MaxLookups

// Recent is the answer of /explain?last=N.
type Recent struct {
	history.Recent
	Hints []hints.Receipt `json:"hints,omitempty"` // the last, the newest first
}

// explain serves GET /explain?request=ID, ?block=HASH and ?last=N.
func (s *Server) explain(rw http.ResponseWriter, r *http.Request) {
	world, query := s.view.source.Explain, r.URL.Query()
	if world == nil {
		http.Error(rw, "nothing is remembered", http.StatusNotFound)
		return
	}
	var out any
	var err error
	switch {
	case query.Has("request"):
		out, err = world.Request(query.Get("request"))
	case query.Has("block"):
		out, err = world.Block(query.Get("block"))
	case query.Has("last"):
		n, bad := strconv.ParseUint(query.Get("last"), 10, 31)
		if bad != nil || n > MaxRecent {
			err = fmt.Errorf("last: %q, allowed: 0 to %d", query.Get("last"), MaxRecent)
			break
		}
		hints := s.view.source.Hints.Receipts()
		out = Recent{Recent: world.Recent(int(n)), Hints: hints[:min(int(n), len(hints))]}
	default:
		err = errors.New("request, block, last: none is given, allowed: one of them")
	}
	switch {
	case errors.Is(err, history.ErrUnknown):
		http.Error(rw, err.Error(), http.StatusNotFound)
	case err != nil:
		http.Error(rw, err.Error(), http.StatusBadRequest)
	default:
		writeJSON(rw, out)
	}
}
