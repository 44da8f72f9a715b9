package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
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

	Sources []source `json:"sources"` // of the blocks loaded

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
	Growth            float64 `json:"growth"`                      // of the agents, over the rounds, if it is expected
	// The latest end of a wait of 2 ms in the replay's own process.
	MachineLagUS float64 `json:"machine_lag_max_us"`
	WallS        float64 `json:"wall_s"`
	Seed         uint64  `json:"seed"`

	wrong, failed []string
	rounds        int
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
	ServerKills    int   `json:"server_kills"`
	EnginePauses   int   `json:"engine_pauses"`
	AgentPauses    int   `json:"agent_pauses"`
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
	o.rounds, o.Growth = len(r.sizes), growth(r.sizes)
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
		if p.n == 0 {
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

// expectations are what a scenario asks of its run beyond what must hold of any.
type expectations struct {
	everyFault   bool
	inFlight     share
	cleanUp      time.Duration // 0: any
	hitRateOff   share
	overDeadline time.Duration // 0: any
	growth       share
	blocks       []string // SOURCE=COUNT
}

func (x *expectations) addSettings(f *pflag.FlagSet) {
	f.BoolVar(&x.everyFault, "expect-every-fault", false, "each fault happens, and agents of all nodes are killed")
	f.Var(&x.inFlight, "expect-in-flight", "least share of kills, of engines and agents and of movers, in a copy")
	f.Var(settings.Duration(&x.cleanUp, 0, time.Hour), "expect-clean-up",
		"longest clean-up after an engine's death, on a machine that does not stand still; 0 is any")
	f.Var(&x.hitRateOff, "expect-hit-rate-off", "most that the hit rate differs from the simulation's; 0 is any")
	f.Var(settings.Duration(&x.overDeadline, 0, time.Minute), "expect-over-deadline",
		"most that a look-up is over its deadline, on a machine that does not stand still; 0 is any")
	f.Var(&x.growth, "expect-growth", "most that the agents' memory beside their pools, descriptors or goroutines "+
		"grow from the first half of the rounds to the second; 0 is any")
	f.Var(settings.Names(&x.blocks), "expect-blocks",
		"least blocks from sources in the agents' last lives, such as redis=40; any=50 counts all lives")
}

// Where a wait of the machine itself ends late, so may what consists of several waits of several
// processes; below quietLag it is no excuse.
const (
	busyFactor = 10
	quietLag   = 5 * time.Millisecond
)

// missed returns what the scenario expects and the run did not show.
func (x *expectations) missed(s *scenario, o *Report) error {
	var bad []error
	miss := func(format string, args ...any) { bad = append(bad, fmt.Errorf("expected: "+format, args...)) }
	if x.everyFault {
		for _, fault := range s.faults(&o.Faults) {
			if *fault.every > 0 && *fault.count == 0 {
				miss("%s at least once", fault.name)
			}
		}
		for node, kills := range o.AgentKillsNode {
			if s.killAgent > 0 && kills == 0 {
				miss("a kill of the agent of node %d", node)
			}
		}
	}
	for _, k := range []struct {
		what        string
		all, flying int
	}{{"kills", o.EngineKills + o.AgentKills, o.KillsInFlight}, {"kills of movers", o.MoverKills, o.MoverInFlight}} {
		if float64(k.flying) < float64(x.inFlight)*float64(k.all) {
			miss("%v of %d %s with a copy in flight, there are %d", x.inFlight, k.all, k.what, k.flying)
		}
	}
	lag := time.Duration(o.MachineLagUS * float64(time.Microsecond))
	took := time.Duration(o.CleanupMaxMS * float64(time.Millisecond))
	if most := x.cleanUp + busyFactor*lag; x.cleanUp > 0 && took >= most {
		miss("clean-up of a dead engine in less than %v, it took %v", most, took)
	}
	over, most := time.Duration(o.OverDeadlineUS*float64(time.Microsecond)), x.overDeadline
	if lag > quietLag {
		most += busyFactor * lag
	}
	if x.overDeadline > 0 && over > most {
		miss("no look-up more than %v over its deadline, one was %v", most, over)
	}
	if off := o.HitRate - o.SimHitRate; x.hitRateOff > 0 && max(off, -off) > float64(x.hitRateOff) {
		miss("a hit rate of %.4f, as simulated, within %v: it is %.4f", o.SimHitRate, x.hitRateOff, o.HitRate)
	}
	if x.growth > 0 && (o.Growth > float64(x.growth) || o.rounds < 2) {
		miss("two rounds or more, and growth by at most %v: there are %d, growth by %.4f", x.growth, o.rounds, o.Growth)
	}
	for _, text := range x.blocks {
		name, least, _ := leastBlocks(text) // it was checked
		if n := o.from(name); n < least {
			miss("%d blocks from %s, %d came", least, name, n)
		}
	}
	return errors.Join(bad...)
}

// leastBlocks reads one of expect-blocks.
func leastBlocks(text string) (source string, least uint64, err error) {
	source, number, _ := strings.Cut(text, "=")
	if least, err = strconv.ParseUint(number, 10, 64); err != nil {
		err = fmt.Errorf("expect-blocks: %q, allowed: a source, = and a number, such as redis=40", text)
	}
	return source, least, err
}

func (x *expectations) check() (err error) {
	for _, text := range x.blocks {
		_, _, bad := leastBlocks(text)
		err = errors.Join(err, bad)
	}
	return err
}

// from returns the blocks that came from a source, or from any.
func (o *Report) from(name string) uint64 {
	for _, s := range o.Sources {
		if s.Name == name {
			return s.Blocks
		}
	}
	if name == "any" {
		return o.BlocksLoaded
	}
	return 0
}

// fault is a kind of fault: every how many requests it is to happen, and how often it did.
type fault struct {
	name, what   string
	every, count *int
}

func (s *scenario) faults(f *Faults) []fault {
	return []fault{
		{"kill-engine", "kill an engine", &s.killEngine, &f.EngineKills},
		{"kill-agent", "kill an agent, rotating over the nodes,", &s.killAgent, &f.AgentKills},
		{"kill-mover", "kill a mover of an agent", &s.killMover, &f.MoverKills},
		{"kill-server", "kill the server, and start it again,", &s.killServer, &f.ServerKills},
		{"pause-engine", "stop an engine for a while", &s.pauseEngine, &f.EnginePauses},
		{"pause-agent", "stop an agent for a while, rotating over the nodes,", &s.pauseAgent, &f.AgentPauses},
		{"pause-server", "stop the server for a while", &s.pauseServer, &f.ServerPauses},
	}
}

// anyFault reports whether anything is to be killed or paused.
func (s *scenario) anyFault() bool {
	return slices.ContainsFunc(s.faults(new(Faults)), func(f fault) bool { return *f.every > 0 })
}
