package replay

import (
	"context"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/mockengine"
)

// plannedStrike is a strike that no engine has dealt yet. One on an agent belongs to a node.
type plannedStrike struct {
	mockengine.Strike
	node    int
	planned int // requests dealt before it
}

// maxStrikeWait is how many requests a strike waits for a job in flight where movers are killed
// too: an agent whose mover keeps dying may have no job for the rest of a run.
const maxStrikeWait = 40

// plan decides at each request that is dealt whether to kill or pause a process about now.
func (r *replay) plan(ctx context.Context) {
	s := r.set
	due := func(every int) bool { return every > 0 && r.dealt%every == 0 }
	if due(s.killEngine) {
		r.planStrike(false, 0)
	}
	if due(s.killAgent) {
		r.planStrike(true, r.turn(s.killAgent))
	}
	if due(s.killMover) {
		r.killMover(ctx, r.nodes[r.turn(s.killMover)])
	}
	if due(s.pauseAgent) && r.nodes[r.turn(s.pauseAgent)].pause(ctx, s.pauseFor) {
		r.count(&r.tally.AgentPauses, 0)
	}
	if due(s.pauseEngine) {
		r.pauseEngine(ctx)
	}
	if due(s.killServer) {
		r.killServer(ctx)
	}
	if due(s.pauseServer) && r.server.pause(ctx, s.pauseFor) {
		r.count(&r.tally.ServerPauses, 0)
	}
}

func (r *replay) planStrike(agent bool, node int) {
	s := mockengine.Strike{Agent: agent, Middle: r.rng.IntN(3) == 0, After: r.rng.IntN(strikeSpread)}
	r.strikes = append(r.strikes, plannedStrike{s, node, r.dealt})
}

// turn returns the node whose turn it is in a fault that comes every so many requests; the seed
// chooses the first.
func (r *replay) turn(every int) (node int) {
	return int((r.set.seed + uint64(r.dealt/every)) % uint64(len(r.nodes)))
}

// nextStrike takes a planned strike and the engine that is to deal it, at a moment when a job is in
// flight. Some are dealt blindly instead, whatever the victim does, and so are those on stopped
// agents and their engines, as long as at least half of all are known to hit a job in flight. Where
// movers are killed too, strikes that have waited long are dealt blindly in any case.
func (r *replay) nextStrike() (s *plannedStrike, by *engine, blind bool) {
	if len(r.strikes) == 0 {
		return nil, nil, false
	}
	e := r.engines[r.rng.IntN(len(r.engines))]
	if next := &r.strikes[0]; next.Agent { // an engine strikes the agent that it has
		e = r.engines[next.node+len(r.nodes)*r.rng.IntN((len(r.engines)-next.node-1)/len(r.nodes)+1)]
	}
	r.tally.Lock()
	spare := 2*r.tally.KillsInFlight >= r.tally.EngineKills+r.tally.AgentKills+1
	r.tally.Unlock()
	paused := r.node(e.number).isPaused() // then no job will be in flight soon
	overdue := r.set.killMover > 0 && r.dealt-r.strikes[0].planned >= maxStrikeWait
	if e.wanted || !overdue && (e.strike != nil || paused && !spare) {
		return nil, nil, false
	}
	s = &r.strikes[0]
	r.strikes = r.strikes[1:]
	return s, e, overdue || spare && (paused || r.rng.IntN(blindShare) == 0)
}

// blindKill kills at any moment.
func (r *replay) blindKill(ctx context.Context, s *plannedStrike, victim *engine) {
	time.Sleep(time.Duration(r.rng.IntN(3000)) * time.Microsecond)
	if s.Agent {
		a := r.nodes[s.node]
		r.replaceAgent(ctx, a, a.current())
		return
	}
	r.count(&r.tally.EngineKills, 0)
	victim.wanted = true
	victim.child.Signal(syscall.SIGKILL)
}

// struck handles the report of a strike that was dealt. It hit the agent whose process the engine
// names; if that has ended meanwhile, another fault hit it, and another one runs in its place.
func (r *replay) struck(ctx context.Context, e *engine, pid int) error {
	s := e.strike
	if s == nil {
		return fmt.Errorf("engine %d reported a strike that was not planned", e.number)
	}
	e.strike = nil
	if s.Agent {
		for _, a := range r.nodes {
			if c := a.current(); c != nil && c.OS.Pid == pid && r.replaceAgent(ctx, a, c) {
				r.count(new(int), 1)
			}
		}
		return nil
	}
	r.count(&r.tally.EngineKills, 1)
	e.wanted = true
	return nil
}

func (r *replay) count(n *int, inFlight int) {
	r.tally.Lock()
	defer r.tally.Unlock()
	*n++
	r.tally.KillsInFlight += inFlight
}

// replaceAgent ends an incarnation of an agent and starts the next one, while engines continue. It
// returns false if it is being replaced already.
func (r *replay) replaceAgent(ctx context.Context, a *agentProcess, c *incarnation) bool {
	if !a.expectDeath(c) {
		return false
	}
	r.count(&r.tally.AgentKills, 0)
	r.watch(fmt.Sprintf("the agent of node %d to end and start again", a.node), func() {
		select {
		case <-c.Done:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return
		}
		if err := a.start(ctx); err != nil && ctx.Err() == nil {
			r.fail(fmt.Errorf("start an agent again: %w", err))
		}
	})
	return true
}

// fail ends the run with an error from the background; the first one counts.
func (r *replay) fail(err error) {
	select {
	case r.exits <- err:
	default:
	}
}

// engineEnded handles the end of an engine's process: if it was killed, another one takes its place
// and its requests.
func (r *replay) engineEnded(ctx context.Context, e *engine, exit error) error {
	if !e.wanted {
		return fmt.Errorf("engine %d ended: %w\n%s", e.number, exit, e.log.String())
	}
	if e.left != nil {
		return nil
	}
	r.watchCleanup(ctx, e, time.Now())
	if err := r.spawn(e); err != nil {
		return err
	}
	r.again(e)
	return ctx.Err()
}

// again gives a restarted engine what it had not finished. Its counts since its last report are
// lost; the wrong bytes that it found are not.
func (r *replay) again(e *engine) {
	e.past.Add(&e.last)
	e.past.WrongBytes += e.lost
	e.last, e.lost = mockengine.Stats{}, 0
	if s := e.strike; s != nil {
		e.strike = nil
		r.strikes = append(r.strikes, *s) // it was not dealt: another fault killed the process
	}
	requests := make([]mockengine.Request, 0, len(e.unfinished))
	for _, q := range e.unfinished {
		requests = append(requests, q)
	}
	sortRequests(requests)
	switch {
	case e.leaving: // it was killed after its last stretch
		e.leave()
	case e.running:
		e.send(&mockengine.Command{Op: "run", Until: e.until, SettleMS: int(settleFaults.Milliseconds()),
			Requests: requests})
	default:
		e.owed = requests // it was killed between two stretches: the next one begins with them
	}
}

// watchCleanup measures how long an agent keeps anything of an engine that died.
func (r *replay) watchCleanup(ctx context.Context, e *engine, died time.Time) {
	a, instance := r.node(e.number), e.instance()
	if a.isPaused() {
		return
	}
	_, pauses := a.faults()
	r.watch(fmt.Sprintf("the agent of node %d to forget a dead engine", a.node), func() {
		if a.forgets(ctx, instance, pauses) {
			r.noteCleanup(time.Since(died))
		}
	})
}

// forgets waits, at most emptyWithin, until an agent does not name an engine any more. It returns
// false if that could not be observed, because the agent itself was killed or stopped.
func (a *agentProcess) forgets(ctx context.Context, instance string, pauses int) bool {
	paused := func() bool { _, now := a.faults(); return now != pauses }
	_, err := a.until(ctx, emptyWithin, func(st *admin.Status) bool {
		named := func(e report.EngineStatus) bool { return e.Instance == instance }
		return paused() || !slices.ContainsFunc(st.EngineList, named)
	})
	return err == nil && !paused()
}

func (r *replay) noteCleanup(d time.Duration) {
	r.tally.Lock()
	defer r.tally.Unlock()
	r.tally.cleanup = max(r.tally.cleanup, d)
}

// moverCopyWait is how long to wait for a copy before a mover is killed without one.
const moverCopyWait = 2 * time.Second

// killMover kills a mover of an agent, during a copy if there is one soon. Engines and agent
// continue meanwhile.
func (r *replay) killMover(ctx context.Context, a *agentProcess) {
	r.watch(fmt.Sprintf("a mover of node %d to be killed", a.node), func() {
		ctx, stop := context.WithTimeout(ctx, moverCopyWait)
		defer stop()
		var idle *cudaipc.MoverState
		for ctx.Err() == nil {
			st, err := a.status(ctx)
			for i := range st.Movers {
				if m := &st.Movers[i]; err == nil && m.Running && m.Copies > 0 {
					r.strikeMover(m)
					return
				} else if err == nil && m.Running {
					idle = m
				}
			}
		}
		if idle != nil {
			r.strikeMover(idle)
		}
	})
}

func (r *replay) strikeMover(m *cudaipc.MoverState) {
	if syscall.Kill(m.PID, syscall.SIGKILL) != nil {
		return // the agent was killed meanwhile, and its mover ended with it
	}
	r.tally.Lock()
	defer r.tally.Unlock()
	r.tally.MoverKills++
	if m.Copies > 0 {
		r.tally.MoverInFlight++
	}
}

// pauseEngine stops an engine for a while. It reports nothing meanwhile, and the others wait for it
// at the end of the stretch.
func (r *replay) pauseEngine(ctx context.Context) {
	e := r.engines[r.rng.IntN(len(r.engines))]
	c := e.child
	if e.wanted || c.OS.Signal(syscall.SIGSTOP) != nil {
		return
	}
	r.count(&r.tally.EnginePauses, 0)
	r.watch(fmt.Sprintf("engine %d to be let go on", e.number), func() {
		sleepUntil(ctx, c.Done, r.set.pauseFor)
		c.Signal(syscall.SIGCONT)
	})
}

// startServer starts the server of the shared tier, if there is one. Agents wait for it as for any
// tier (tiers-within).
func (r *replay) startServer() (err error) {
	if r.set.server != "" {
		r.server = &daemon{name: "server: " + r.set.server, command: []string{"sh", "-c", r.set.server}, exits: r.exits}
		_, err = r.server.launch()
	}
	return err
}

// killServer kills the server and starts it again after serverDown, unless the engines have left by
// then.
func (r *replay) killServer(ctx context.Context) {
	c := r.server.current()
	if !r.server.expectDeath(c) {
		return // it is down already
	}
	r.count(&r.tally.ServerKills, 0)
	r.watch("the server to start again", func() {
		<-c.Done
		sleepUntil(ctx, r.leaving, r.set.serverDown)
		select {
		case <-r.leaving:
			return
		case <-ctx.Done():
			return
		default:
		}
		if _, err := r.server.launch(); err != nil {
			r.fail(err)
		}
	})
}
