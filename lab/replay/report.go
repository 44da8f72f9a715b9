package replay

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvagent/kvagent/mockengine"
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
	// the farthest that a look-up was over its deadline, as the agents' last incarnations report it
	OverDeadlineUS float64 `json:"lookup_over_deadline_max_us"`
	// the latest end of a wait of 2 ms in the replay's own process
	MachineLagUS      float64  `json:"machine_lag_max_us"`
	CleanupMaxMS      float64  `json:"cleanup_max_ms"` // from a process's death until the agent no longer names it
	Preemptions       uint64   `json:"preemptions"`
	SavesRevoked      uint64   `json:"saves_revoked"`
	SavesBusy         uint64   `json:"saves_busy"`
	LoadsFailed       uint64   `json:"loads_failed"`
	LoadsLate         uint64   `json:"loads_late"`
	Steps             uint64   `json:"steps"`
	Sources           []source `json:"sources"` // of the blocks loaded
	LookupsPending    uint64   `json:"lookups_pending"`
	SamplesMismatched uint64   `json:"samples_mismatched"` // as the agents' last incarnations found
	WallS             float64  `json:"wall_s"`
	Seed              uint64   `json:"seed"`

	wrong, failed []string
	stopErr       error
}

func (r *replay) report() Report {
	var total mockengine.Stats
	o := Report{Requests: r.done, FailedRequests: len(r.failed), LeasesLeft: r.leases, RegionsLeft: r.regions,
		EnginesLeft: r.leftEngines, ImportsLeft: r.imports,
		Seed: r.set.seed, WallS: time.Since(r.begin).Seconds(), Sources: r.sources,
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
		func(i int) int { return r.deal[i] })
	o.addStats(&total)
	o.OverDeadlineUS, o.MachineLagUS, o.SamplesMismatched = r.late, micros(r.lag), r.mismatched
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
	o.CleanupMaxMS = float64(r.tally.cleanup) / float64(time.Millisecond)
	return o
}

func (o *Report) addStats(s *mockengine.Stats) {
	o.BlocksSaved, o.BlocksLoaded = s.BlocksSaved, s.BlocksLoaded
	o.BytesSaved, o.BytesLoaded = s.BytesSaved, s.BytesLoaded
	o.BlocksVerified, o.WrongBytes = s.BlocksVerified, s.WrongBytes
	o.Lookups, o.LookupMisses, o.LookupsPending = s.Lookups, s.LookupMisses, s.LookupsPending
	o.LookupP50US, o.LookupP99US = micros(s.LookupTimes.Quantile(0.5)), micros(s.LookupTimes.Quantile(0.99))
	o.Preemptions, o.SavesRevoked, o.SavesBusy, o.Steps = s.Preemptions, s.SavesRevoked, s.SavesBusy, s.Steps
	o.LoadsFailed, o.LoadsLate = s.LoadsFailed, s.LoadsLate
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
