package admin

import (
	"time"

	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/agent/page"
)

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
		SlowestUS:       v.metrics.lookupRecent.take(),
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
