package replay

import (
	"cmp"
	"context"
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
	SimHitRate      float64 `json:"sim_hit_rate"` // of one round, without faults
	BlocksHitOwn    int     `json:"blocks_hit_own"`
	BlocksHitPool   int     `json:"blocks_hit_pool"`
	BlocksHitOther  int     `json:"blocks_hit_other_engine"`

	mockengine.Stats // of all engines

	LookupP50US float64  `json:"lookup_p50_us"`
	LookupP99US float64  `json:"lookup_p99_us"`
	Sources     []source `json:"sources"` // of the blocks loaded

	Faults

	LeasesLeft   int `json:"leases_left"`
	RegionsLeft  int `json:"regions_left"`
	EnginesLeft  int `json:"engines_left"`
	ImportsLeft  int `json:"imports_left"`       // of GPU memory and events
	EngineBlocks int `json:"engine_blocks_left"` // blocks of engines that were not free in the end
	// From a process's death until the agent no longer names it.
	CleanupMaxMS float64 `json:"cleanup_max_ms"`
	// As the agents' last incarnations report them.
	SamplesMismatched uint64  `json:"samples_mismatched"`
	OverDeadlineUS    float64 `json:"lookup_over_deadline_max_us"` // the farthest of a look-up
	// The latest end of a wait of 2 ms in the replay's own process.
	MachineLagUS float64 `json:"machine_lag_max_us"`
	WallS        float64 `json:"wall_s"`
	Seed         uint64  `json:"seed"`

	wrong, failed []string
	stopErr       error
}

// Faults counts what was killed and paused.
type Faults struct {
	EngineKills    int   `json:"engine_kills"`
	AgentKills     int   `json:"agent_kills"`
	AgentKillsNode []int `json:"agent_kills_by_node"`
	KillsInFlight  int   `json:"kills_in_flight"` // of engines and agents, with a job in flight
	MoverKills     int   `json:"mover_kills"`
	MoverInFlight  int   `json:"mover_kills_in_flight"` // with a copy in flight
	HelperKills    int   `json:"helper_kills"`
	ServerKills    int   `json:"server_kills"`
	EnginePauses   int   `json:"engine_pauses"`
	AgentPauses    int   `json:"agent_pauses"`
	HelperPauses   int   `json:"helper_pauses"`
	ServerPauses   int   `json:"server_pauses"`
}

func (r *replay) report() Report {
	o := r.result
	o.Requests, o.FailedRequests, o.Seed, o.WallS = r.done, len(r.failed), r.set.seed, time.Since(r.begin).Seconds()
	o.wrong, o.failed, o.stopErr, o.MachineLagUS = r.wrong, r.failed, r.stopErr, micros(r.lag)
	for _, e := range r.engines {
		s := e.stats()
		s.WrongBytes += e.lost
		o.Stats.Add(&s)
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
	o.LookupP50US, o.LookupP99US = micros(o.LookupTimes.Quantile(0.5)), micros(o.LookupTimes.Quantile(0.99))
	o.LookupTimes = nil // the quantiles are printed
	o.BlocksHit = o.BlocksHitOwn + o.BlocksHitPool
	o.HitRate = ratio(o.BlocksHit, o.BlocksLookedUp)
	o.SimHitRate = mockengine.Simulate(r.records, len(r.engines), r.cfg.Blocks, r.set.poolBlocks(&r.cfg, r.capacity),
		func(i int) int { return r.deal[i] })
	r.tally.Lock()
	defer r.tally.Unlock()
	o.Faults, o.CleanupMaxMS = r.tally.Faults, float64(r.tally.cleanup)/float64(time.Millisecond)
	for _, n := range r.nodes {
		kills, _ := n.faults()
		o.AgentKillsNode = append(o.AgentKillsNode, kills)
	}
	return o
}

// verdict returns nil if every promise was kept, and what the scenario expects was seen.
func (o *Report) verdict(s *scenario) error {
	bad := []error{s.expect.missed(s, o)}
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
		wanted := p.what == "wrong bytes" && s.expect.wrongBytes
		if wanted != (p.n == 0) {
			continue
		}
		text := fmt.Sprintf("%d %s", p.n, p.what)
		for _, m := range p.more[:min(len(p.more), 3)] {
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

// addReport adds an engine's report.
func (r *replay) addReport(e *engine, report *mockengine.Report) {
	if report.Stats != nil {
		e.last, e.lost = *report.Stats, 0
	}
	for _, o := range report.Outcomes {
		q, ok := e.unfinished[o.ID]
		if !ok {
			continue
		}
		delete(e.unfinished, o.ID)
		if q.ID >= probeID {
			continue
		}
		r.done++
		if o.Failed != "" {
			r.failed = append(r.failed, fmt.Sprintf("request %d: %s", o.ID, o.Failed))
		}
		r.countHits(e, &q, &o)
	}
}

// countHits adds a request's blocks to its engine's columns. A request whose engine was killed
// finds in the second engine what it computed itself in the first: only what an earlier request had
// counts as a hit.
func (r *replay) countHits(e *engine, q *mockengine.Request, o *mockengine.Outcome) {
	known := 0
	for known < len(q.Prompt) && r.firstIn[q.Prompt[known]] < q.ID {
		known++
	}
	o.Own = min(o.Own, known)
	o.Pool = min(o.Pool, known-o.Own)
	e.requests++
	e.blocks += len(q.Prompt)
	e.own += o.Own
	e.pooled += o.Pool
	if o.Aborted {
		e.aborted++
	}
	for i, id := range q.Prompt {
		by, known := r.firstBy[id]
		if !known {
			r.firstBy[id] = e.number
		} else if i >= o.Own && i < o.Own+o.Pool && by != e.number {
			e.others++
		}
	}
}

// probe damages a block of the prompt that one engine saved last, and lets another one load all of
// them: its prompt is the same and one block longer.
func (r *replay) probe(ctx context.Context) error {
	var ids []uint64
	for i := range uint64(probeBlocks + 1) {
		ids = append(ids, probeID+i)
	}
	for i := range 2 {
		batches := make([][]mockengine.Request, len(r.engines))
		batches[i] = []mockengine.Request{{ID: probeID + uint64(i), Prompt: ids[:probeBlocks+i], Output: 1}}
		if err := r.stretch(ctx, batches, -1); err != nil {
			return err
		}
		if i == 0 {
			if err := r.flip(ctx, r.nodes[0], ids[:probeBlocks]); err != nil {
				return fmt.Errorf("flip a byte: %w", err)
			}
		}
	}
	return nil
}

// leave ends every engine and waits until the agent has forgotten them.
func (r *replay) leave(ctx context.Context) error {
	for _, e := range r.engines {
		e.leave()
	}
	if err := r.wait(ctx, "leave", func(e *engine) bool { return e.left != nil }); err != nil {
		return err
	}
	close(r.leaving)
	if err := r.awaitWatches(ctx); err != nil { // an agent that was killed last is running again
		return err
	}
	for _, a := range r.nodes {
		st, err := a.until(ctx, emptyWithin, empty)
		if err != nil {
			return fmt.Errorf("status in the end: %w", err)
		}
		o := &r.result
		o.LeasesLeft += st.Leases
		o.RegionsLeft += st.Regions
		o.EnginesLeft += st.Engines
		o.ImportsLeft += openImports(&st)
		r.noteCleanup(time.Duration(st.CleanupMaxMS * float64(time.Millisecond)))
		r.addSources(&st)
		o.SamplesMismatched += st.Sample.Saves.Mismatched + st.Sample.Loads.Mismatched
		o.OverDeadlineUS = max(o.OverDeadlineUS, st.LookupOverUS)
	}
	return nil
}
