// Package replay runs a recorded trace through agents and mock engines, and reports the outcome.
package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/lab/child"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// Command returns the command replay.
func Command() *cobra.Command {
	s := newScenario()
	remove := func() {}
	cmd := &cobra.Command{
		Use:   "replay --trace FILE [--scenario FILE]",
		Short: "Replay a recorded trace through mock engines, with every byte checked",
		Long: `Replay starts an agent (the kvagent in this program's folder, or that of --kvagent) and mock engines
in processes of their own. It sends them the requests of a trace in Mooncake's format, in virtual
time: arrivals keep their order, and the trace runs as fast as the machine allows. Every block that
is loaded from the pool is compared byte for byte, and every block of a request again when it ends.

Turns of one conversation go to different engines, so that one engine hits what another one saved.
In a scenario engines, the agents of all nodes, their movers and the server of a shared tier can be
killed and paused at random moments, engines and agents preferably while a copy is in flight; then
requests are computed again and none may fail. Faults rotate over the nodes, from one that the seed
chooses.

A replay whose engines report nothing for long fails and names what it waits for. SIGTERM and SIGINT
end it, and everything that it started, within 20 s.

It fails (exit code 1) if a byte was wrong, a request failed, a lease or a mapping is left at the
end, or the scenario expected something else.

A scenario is a YAML file, a setting a line; testdata/scenarios has some. It may have the flags
requests, engines, pace, seed and device, which the command line overrides, and, where the tiers and
the server may name $KVBENCH_DIR, an empty directory, $KVBENCH_PORT and $KVBENCH_PORT2, free ports
of loopback, $KVBENCH_KEY, a key for servers of the run, and other variables of the environment:
` + fileHelp(),
		Example: `  kvbench replay --trace conversation.jsonl --progress
  kvbench replay --trace conversation.jsonl --json --scenario testdata/scenarios/short/kills.yaml --seed 1`,
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if remove, err = setVariables(); err != nil {
				return err
			}
			if err := s.read(cmd.Flags()); err != nil {
				remove()
				return settings.Invalid(err)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			defer remove()
			defer endInTime(ctx, cmd.ErrOrStderr())()
			return run(ctx, s, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().SortFlags = false
	s.addFlags(cmd.Flags())
	return cmd
}

// run is the whole run; the error is its verdict.
func run(ctx context.Context, s *scenario, out, log io.Writer) error {
	if s.seed == 0 {
		s.seed = uint64(time.Now().UnixNano())
	}
	records, err := mockengine.ReadTrace(s.trace, s.requests)
	if err != nil {
		return settings.Invalid(err)
	}
	if len(records) == 0 {
		return settings.Invalid(fmt.Errorf("%s: no requests", s.trace))
	}
	r, err := newReplay(s, records)
	if err != nil {
		return settings.Invalid(err)
	}
	r.show = newProgress(s, out, log)
	err = r.run(ctx)
	report := r.report()
	r.show.end(r, &report)
	if err != nil {
		return err
	}
	return report.verdict(s)
}

// Times in which a replay ends what it started.
const (
	EndsWithin    = 20 * time.Second // after SIGTERM or SIGINT everything has ended; the times below add up to less
	brokenWithin  = 8 * time.Second  // for agents to end by themselves when the run is aborted
	enginesWithin = 10 * time.Second // for processes of engines that have left to end

	serverDownWithin = 5 * time.Second // for the server of a shared tier to end
)

// endInTime ends this process if it has not ended EndsWithin after ctx is done; the kernel kills
// its children with it. The caller calls disarm when everything has ended.
func endInTime(ctx context.Context, log io.Writer) (disarm func()) {
	over := make(chan struct{})
	go func() {
		select {
		case <-over:
			return
		case <-ctx.Done():
		}
		timer := time.NewTimer(EndsWithin)
		defer timer.Stop()
		select {
		case <-over:
		case <-timer.C:
			fmt.Fprintf(log, "replay: not over %v after its end was requested: killed\n", EndsWithin)
			os.Exit(1)
		}
	}()
	return func() { close(over) }
}

// Times of a run.
const (
	settleCalm    = 2 * time.Second        // longest wait for saves at the end of a stretch
	settleFaults  = 250 * time.Millisecond // the same with kills or pauses
	emptyWithin   = 10 * time.Second       // for the agent to forget engines that left
	absentPause   = 100 * time.Millisecond // between two stretches without an agent
	roundIDs      = 1 << 40                // hash ids of one round with duration
	eventBacklog  = 1024
	blindShare    = 4 // one kill of this many does not wait for a job in flight
	strikeSpread  = 12
	minuteVirtual = 60_000 // ms between two rounds
)

// replay is one run. One goroutine drives it.
//
// Virtual time advances in stretches, from one timestamp of the trace to the next. All engines run
// a stretch concurrently, each at its own pace, and wait for their saves before the next. So the
// blocks that a turn saved are stored when the next turn of that conversation asks, as with minutes
// between them, however fast this machine is. Within a stretch, requests of equal timestamps share
// next to nothing beyond their first block (one block in the whole conversation trace). So the hit
// rate depends on the caches alone and can be compared with a simulation without time. The
// remaining difference comes from whole prompts that were seen before, whose last block is computed
// anyway (118 of 288,500 blocks), and from blocks of running requests and answers in the caches.
type replay struct {
	set     *scenario
	records []mockengine.Record
	deal    []int
	cfg     mockengine.Config
	rng     *rand.Rand
	show    *progress

	engines  []*engine
	events   chan engineEvent
	readers  sync.WaitGroup
	watching sync.WaitGroup // of watches
	watches  sync.Map       // what each waits for
	leaving  chan struct{}  // closed when the engines have left
	exits    chan error     // an unexpected end, which ends the run
	server   *daemon        // of the shared tier; nil: none
	broken   bool           // an error ends the run

	begin   time.Time
	dealt   int // requests dealt, all rounds
	done    int
	failed  []string
	firstBy map[uint64]int    // engine that computed a block first
	firstIn map[uint64]uint64 // first request whose prompt had it
	strikes []plannedStrike
	wrong   []string
	tally   struct {
		sync.Mutex
		Faults
		cleanup time.Duration
	}
	sizes    []size        // at the end of each round
	lag      time.Duration // of the machine
	capacity int64         // bytes of the pool of an agent that was not started here
	result   Report        // what the agents reported when the engines had left
	nodes    []*agentProcess
	stopErr  error
}

func newReplay(s *scenario, records []mockengine.Record) (*replay, error) {
	cfg, err := s.engineConfig(records)
	if err != nil {
		return nil, err
	}
	r := &replay{set: s, records: records, deal: dealTurns(records, s.engines), cfg: cfg,
		rng:    rand.New(rand.NewPCG(s.seed, 77)),
		events: make(chan engineEvent, eventBacklog), firstBy: make(map[uint64]int), firstIn: make(map[uint64]uint64),
		leaving: make(chan struct{}), exits: make(chan error, 1)}
	for n := range s.engines {
		r.engines = append(r.engines, &engine{number: n, unfinished: make(map[uint64]mockengine.Request)})
	}
	return r, nil
}

// run replays everything, and ends everything that it started.
func (r *replay) run(ctx context.Context) (err error) {
	r.begin = time.Now()
	endLag := measureLag(ctx)
	defer func() { r.lag = endLag() }()
	mark, err := child.Mark()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer func() {
		r.broken = err != nil
		stop()
		r.stopErr = r.end(mark)
		err = errors.Join(err, r.stopErr)
	}()
	if r.set.socket != "" {
		a := useAgent(r.set.socket)
		st, err := a.status(ctx)
		if err != nil {
			return err
		}
		r.capacity = st.Pool.Capacity
		r.nodes = []*agentProcess{a}
	} else if err := r.startServer(); err != nil {
		return err
	} else if err := r.launchNodes(ctx); err != nil {
		return err
	}
	for _, e := range r.engines {
		if err := r.spawn(e); err != nil {
			return err
		}
	}
	if err := r.rounds(ctx); err != nil {
		return err
	}
	return r.leave(ctx)
}

// end ends everything that was started: engines, watches, agents, the server, and processes that
// agents left. After an aborted run agents get less time.
func (r *replay) end(mark string) error {
	within := agentDownWithin
	if r.broken {
		within = brokenWithin
	}
	r.endAll()
	r.watching.Wait()
	bad := r.stopNodes(within)
	if r.server != nil {
		bad = errors.Join(bad, r.server.end(serverDownWithin))
	}
	return errors.Join(bad, child.Strays(mark))
}

// daemons returns the agents, and the server if there is one.
func (r *replay) daemons() (all []*daemon) {
	for _, a := range r.nodes {
		all = append(all, &a.daemon)
	}
	if r.server != nil {
		all = append(all, r.server)
	}
	return all
}

// rounds replays the trace once, or, with a duration, repeatedly with new prompts.
func (r *replay) rounds(ctx context.Context) error {
	offset := 0.0
	for round := uint64(0); ; round++ {
		records := freshRecords(r.records, round, offset)
		if err := r.round(ctx, records); err != nil {
			return err
		}
		if r.set.expect.growth > 0 { // a paused agent would not answer
			r.noteSize(ctx)
		}
		offset = records[len(records)-1].Timestamp + minuteVirtual
		if time.Since(r.begin) >= r.set.duration {
			return nil
		}
	}
}

// freshRecords returns the records with other hash ids, later.
func freshRecords(records []mockengine.Record, round uint64, offset float64) []mockengine.Record {
	fresh := make([]mockengine.Record, len(records))
	for i, rec := range records {
		rec.Timestamp += offset
		ids := make([]uint64, len(rec.HashIDs))
		for k, id := range rec.HashIDs {
			ids[k] = id + round*roundIDs
		}
		rec.HashIDs = ids
		fresh[i] = rec
	}
	return fresh
}

// round replays records once, stretch by stretch.
func (r *replay) round(ctx context.Context, records []mockengine.Record) error {
	clear(r.firstBy) // of the last round: its hash ids never recur
	clear(r.firstIn)
	for from := 0; from < len(records); {
		to := from
		for to < len(records) && records[to].Timestamp == records[from].Timestamp {
			to++
		}
		until := -1.0
		if to < len(records) {
			until = records[to].Timestamp
		}
		batches := make([][]mockengine.Request, len(r.engines))
		for i := from; i < to; i++ {
			r.dealt++
			for _, id := range records[i].HashIDs {
				if _, known := r.firstIn[id]; !known {
					r.firstIn[id] = uint64(r.dealt)
				}
			}
			r.plan(ctx)
			batches[r.deal[i]] = append(batches[r.deal[i]], r.set.requestFor(r.rng, uint64(r.dealt), &records[i]))
		}
		gap := time.Duration((records[from].Timestamp - records[max(from-1, 0)].Timestamp) * float64(time.Millisecond))
		if err := r.pace(ctx, records[from].Timestamp/max(records[len(records)-1].Timestamp, 1), gap); err != nil {
			return err
		}
		if err := r.stretch(ctx, batches, until); err != nil {
			return err
		}
		from = to
		if r.set.duration > 0 && time.Since(r.begin) >= r.set.duration {
			return r.stretch(ctx, make([][]mockengine.Request, len(r.engines)), -1)
		}
	}
	return nil
}

// pace delays the replay so that it takes at least the configured time; part is its progress, 0 to
// 1. While an agent is stopped or restarting, the trace runs in its own time, gap since the last
// stretch: ten seconds without an agent then affect ten seconds' requests and not thousands.
func (r *replay) pace(ctx context.Context, part float64, gap time.Duration) error {
	until := r.begin.Add(time.Duration(part * float64(r.set.pace)))
	if least := time.Now().Add(absentPause); r.agentAbsent() && until.Before(least) {
		until = least
	}
	resumed := r.resumed()
	if least := time.Now().Add(gap); resumed != nil && until.Before(least) {
		until = least
	}
	due := time.NewTimer(time.Until(until))
	defer due.Stop()
	for {
		select {
		case <-due.C:
			return nil
		case <-resumed:
			return nil
		case <-r.show.tick():
			r.show.line(r)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// resumed returns a channel that is closed when a stopped agent continues; nil if none is stopped.
func (r *replay) resumed() <-chan struct{} {
	for _, a := range r.nodes {
		if c := a.resumed(); c != nil {
			return c
		}
	}
	return nil
}

// agentAbsent reports whether an agent is stopped, or an engine was without one at the end of its
// last stretch.
func (r *replay) agentAbsent() bool {
	for _, e := range r.engines {
		if e.detached {
			return true
		}
	}
	return r.resumed() != nil
}

// stretch runs all engines up to a virtual time and waits for them.
func (r *replay) stretch(ctx context.Context, batches [][]mockengine.Request, until float64) error {
	settle := settleCalm
	if r.set.anyFault() {
		settle = settleFaults
	}
	strike, by, blind := r.nextStrike()
	for i, e := range r.engines {
		c := &mockengine.Command{Op: "run", Until: until, SettleMS: int(settle.Milliseconds()), Requests: batches[i]}
		if e == by && !blind {
			c.Strike, e.strike = &strike.Strike, strike
		}
		e.send(c)
	}
	if blind {
		r.blindKill(ctx, strike, by)
	}
	return r.wait(ctx, "end its stretch", func(e *engine) bool { return !e.running })
}

// wait handles events until all engines are ready. An engine that does not report for stalledAfter
// has stalled.
func (r *replay) wait(ctx context.Context, what string, ready func(*engine) bool) error {
	limit := time.NewTimer(r.set.stalledAfter)
	defer limit.Stop()
	for {
		all := true
		for _, e := range r.engines {
			all = all && ready(e)
		}
		if all {
			return nil
		}
		select {
		case ev := <-r.events:
			limit.Reset(r.set.stalledAfter)
			if err := r.handle(ctx, ev); err != nil {
				return err
			}
		case err := <-r.exits:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-limit.C:
			return r.stalled(what, ready)
		case <-r.show.tick():
			r.show.line(r)
		}
	}
}

// handle handles one event.
func (r *replay) handle(ctx context.Context, ev engineEvent) error {
	if ev.exited {
		return r.engineEnded(ctx, ev.engine, ev.err)
	}
	e := ev.engine
	switch ev.report.Op {
	case "ran":
		e.running = false
		e.detached = !ev.report.Attached
		r.addReport(e, ev.report)
	case "left":
		r.addReport(e, ev.report)
		e.left = ev.report
	case "strike":
		return r.struck(ctx, e, ev.report.PID)
	case "wrong":
		r.wrong = append(r.wrong, fmt.Sprintf("engine %d: %s", e.number, ev.report.Text))
		e.lost++
	case "error":
		return fmt.Errorf("engine %d: %s", e.number, ev.report.Text)
	}
	return nil
}
