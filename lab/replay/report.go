package replay

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool"
)

// Report is the output of --json. Blocks of prompts are counted once each, those of jobs once for
// all ranks, bytes on every rank; the names have the units of times.
type Report struct {
	Requests        int     `json:"requests"`
	FailedRequests  int     `json:"failed_requests"`
	AbortedRequests int     `json:"aborted_requests"`
	BlocksLookedUp  int     `json:"blocks_looked_up"`
	BlocksHit       int     `json:"blocks_hit"`
	HitRate         float64 `json:"hit_rate"`
	SimHitRate      float64 `json:"sim_hit_rate"` // of one round
	BlocksHitOwn    int     `json:"blocks_hit_own"`
	BlocksHitPool   int     `json:"blocks_hit_pool"`
	BlocksHitOther  int     `json:"blocks_hit_other_engine"`
	BlocksSaved     uint64  `json:"blocks_saved"`
	BlocksLoaded    uint64  `json:"blocks_loaded"`
	BytesSaved      uint64  `json:"bytes_saved"`
	BytesLoaded     uint64  `json:"bytes_loaded"`
	BlocksVerified  uint64  `json:"blocks_verified"`
	WrongBytes      uint64  `json:"wrong_bytes"`
	LeasesLeft      int     `json:"leases_left"`
	RegionsLeft     int     `json:"regions_left"`
	EnginesLeft     int     `json:"engines_left"`
	ImportsLeft     int     `json:"imports_left"`       // of GPU memory and events
	EngineBlocks    int     `json:"engine_blocks_left"` // blocks of engines that were not free in the end
	EngineKills     int     `json:"engine_kills"`
	AgentKills      int     `json:"agent_kills"`
	AgentPauses     int     `json:"agent_pauses"`
	MoverKills      int     `json:"mover_kills"`
	MoverInFlight   int     `json:"mover_kills_in_flight"` // with a copy in flight
	KillsInFlight   int     `json:"kills_in_flight"`
	AgentKillsNode  []int   `json:"agent_kills_by_node"`
	EnginePauses    int     `json:"engine_pauses"` // of processes
	HelperKills     int     `json:"helper_kills"`
	HelperPauses    int     `json:"helper_pauses"`
	ServerKills     int     `json:"server_kills"`
	ServerPauses    int     `json:"server_pauses"`
	Lookups         uint64  `json:"lookups"`
	LookupMisses    uint64  `json:"lookups_unanswered"`
	LookupP50US     float64 `json:"lookup_p50_us"`
	LookupP99US     float64 `json:"lookup_p99_us"`
	// the longest, by the clocks of the agents' last incarnations
	AgentLookupUS float64 `json:"agent_lookup_max_us"`
	AgentAskUS    float64 `json:"agent_lookup_ask_max_us"` // of that the longest wait for shared tiers
	// the latest end of a wait of 2 ms in the replay's own process
	MachineLagUS float64 `json:"machine_lag_max_us"`
	// the farthest beyond its deadline, by the same clock
	OverDeadlineUS float64 `json:"lookup_over_deadline_max_us"`
	// when the agent read that one, Unix time; 0: none was late
	OverDeadlineAtS float64  `json:"lookup_over_deadline_max_at_s"`
	OverTookUS      float64  `json:"lookup_over_deadline_max_took_us"`
	CleanupMaxMS    float64  `json:"cleanup_max_ms"`       // from a process's death until the agent no longer names it
	AgentCleanupMS  float64  `json:"agent_cleanup_max_ms"` // as the agent's last incarnation reports it
	Preemptions     uint64   `json:"preemptions"`
	SavesRevoked    uint64   `json:"saves_revoked"`
	SavesBusy       uint64   `json:"saves_busy"`
	LoadsFailed     uint64   `json:"loads_failed"`
	LoadsLate       uint64   `json:"loads_late"`
	DraftsRejected  uint64   `json:"drafts_rejected"`
	Steps           uint64   `json:"steps"`
	HitRateBefore   float64  `json:"hit_rate_before_agent_kills"` // of the aroundKill requests dealt before each
	HitRateAfter    float64  `json:"hit_rate_after_agent_kills"`  // and of those after it
	Sources         []source `json:"sources"`                     // of the blocks loaded
	LookupsPending  uint64   `json:"lookups_pending"`
	// Blocks that the agents' last incarnations checked end to end.
	SamplesMatched    uint64 `json:"samples_matched"`
	SamplesMismatched uint64 `json:"samples_mismatched"`
	SamplesUnverified uint64 `json:"samples_unverified"`
	// Of the eviction policies of the agents' last incarnations, in the order of the nodes.
	Evictions []pool.PolicyReport `json:"evictions"`
	WallS     float64             `json:"wall_s"`
	Seed      uint64              `json:"seed"`

	wrong, failed []string
	stopErr       error
}

func (r *replay) report() Report {
	var total mockengine.Stats
	o := Report{Requests: r.done, FailedRequests: len(r.failed), LeasesLeft: r.leases, RegionsLeft: r.regions,
		EnginesLeft: r.leftEngines, ImportsLeft: r.imports,
		Seed: r.set.seed, WallS: time.Since(r.begin).Seconds(), Sources: r.sources, Evictions: r.evictions,
		wrong: r.wrong, failed: r.failed,
		stopErr: r.stopErr}
	for _, e := range r.engines {
		s := e.stats()
		s.WrongBytes += e.lost
		total.Add(&s)
		o.AbortedRequests += e.aborted
		o.BlocksLookedUp += e.blocks
		o.BlocksHitOwn += e.own
		o.BlocksHitPool += e.pooled
		o.BlocksHitOther += e.others
		o.FailedRequests += len(e.unfinished)
		if e.left != nil {
			o.EngineBlocks += e.left.InUse
		}
	}
	o.BlocksHit = o.BlocksHitOwn + o.BlocksHitPool
	o.HitRate = ratio(o.BlocksHit, o.BlocksLookedUp)
	o.SimHitRate = mockengine.Simulate(r.records, len(r.engines), r.cfg.Blocks, r.set.poolBlocks(&r.cfg, r.capacity),
		func(i int) int { return r.deal[i] }, r.faults)
	o.addStats(&total)
	o.AgentLookupUS, o.AgentAskUS, o.OverDeadlineUS = r.slowest.whole, r.slowest.ask, r.slowest.over
	o.OverDeadlineAtS, o.OverTookUS = r.slowest.overAt, r.slowest.overTook
	o.MachineLagUS = micros(r.lag)
	o.SamplesMatched, o.SamplesMismatched = r.sample.Matched, r.sample.Mismatched
	o.SamplesUnverified = r.sample.Unverified
	o.HitRateBefore, o.HitRateAfter = r.around.rates()
	r.tally.Lock()
	defer r.tally.Unlock()
	o.EngineKills, o.AgentKills = r.tally.engineKills, r.tally.agentKills
	o.AgentPauses, o.KillsInFlight = r.tally.pauses, r.tally.inFlight
	o.MoverKills, o.MoverInFlight = r.tally.moverKills, r.tally.moverInFlight
	for _, n := range r.nodes {
		o.AgentKillsNode = append(o.AgentKillsNode, n.killed())
	}
	o.EnginePauses, o.HelperKills, o.HelperPauses = r.tally.enginePauses, r.tally.helperKills, r.tally.helperPauses
	o.ServerKills, o.ServerPauses = r.tally.serverKills, r.tally.serverPauses
	o.CleanupMaxMS, o.AgentCleanupMS = float64(r.tally.cleanup)/float64(time.Millisecond), r.ownCleanup
	return o
}

func (o *Report) addStats(s *mockengine.Stats) {
	o.BlocksSaved, o.BlocksLoaded = s.BlocksSaved, s.BlocksLoaded
	o.BytesSaved, o.BytesLoaded = s.BytesSaved, s.BytesLoaded
	o.BlocksVerified, o.WrongBytes = s.BlocksVerified, s.WrongBytes
	o.Lookups, o.LookupMisses, o.LookupsPending = s.Lookups, s.LookupMisses, s.LookupsPending
	o.LookupP50US, o.LookupP99US = micros(s.LookupTimes.Quantile(0.5)), micros(s.LookupTimes.Quantile(0.99))
	o.Preemptions, o.SavesRevoked, o.SavesBusy, o.Steps = s.Preemptions, s.SavesRevoked, s.SavesBusy, s.Steps
	o.LoadsFailed, o.LoadsLate, o.DraftsRejected = s.LoadsFailed, s.LoadsLate, s.Rejected
}

// verdict returns nil if every promise was kept.
func (o *Report) verdict() error {
	var bad []error
	for _, p := range []struct {
		n    int
		what string
		more []string
	}{
		{int(o.WrongBytes), "wrong bytes", o.wrong}, {o.FailedRequests, "failed requests", o.failed},
		{o.LeasesLeft, "leases left", nil},
		{int(o.SamplesMismatched), "blocks that an agent found to differ from the engine's", nil},
		{o.RegionsLeft, "mappings left", nil}, {o.EnginesLeft, "engines left", nil},
		{o.ImportsLeft, "imports left", nil}, {o.EngineBlocks, "blocks of engines not free", nil},
	} {
		if p.n == 0 {
			continue
		}
		text := fmt.Sprintf("%d %s", p.n, p.what)
		for i, m := range p.more {
			if i == 3 {
				break
			}
			text += "\n  " + m
		}
		bad = append(bad, errors.New(text))
	}
	return errors.Join(bad...)
}

func ratio(a, b int) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func sortRequests(q []mockengine.Request) {
	slices.SortFunc(q, func(a, b mockengine.Request) int {
		return cmp.Or(cmp.Compare(a.At, b.At),
			cmp.Compare(a.ID, b.ID))
	})
}

// aroundKill is how many requests before and after a kill of the agent are compared.
const aroundKill = 50

// around compares the hits before and after kills of the agent: requests in the order in which they
// were dealt, which is their number less one.
type around struct {
	requests []blocksOf
	kills    []int // number of the request dealt last
}

type blocksOf struct{ blocks, hits int }

func (a *around) kill(dealt int) { a.kills = append(a.kills, dealt) }

// request records the hits of a request. One that was computed twice counts as it ended.
func (a *around) request(number, blocks, hits int) {
	for len(a.requests) < number {
		a.requests = append(a.requests, blocksOf{})
	}
	a.requests[number-1] = blocksOf{blocks, hits}
}

// rates returns the shares of hits before and after all kills.
func (a *around) rates() (before, after float64) {
	var b, f blocksOf
	for _, at := range a.kills {
		b.add(a.between(at-aroundKill, at))
		f.add(a.between(at, at+aroundKill))
	}
	return ratio(b.hits, b.blocks), ratio(f.hits, f.blocks)
}

func (a *around) between(from, to int) (sum blocksOf) {
	n := len(a.requests)
	for _, r := range a.requests[min(max(from, 0), n):min(to, n)] {
		sum.add(r)
	}
	return sum
}

func (b *blocksOf) add(o blocksOf) { b.blocks, b.hits = b.blocks+o.blocks, b.hits+o.hits }
