package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/mockengine"
)

// plannedStrike is a strike that no engine has dealt yet. An agent that it is to hit is that of a
// node.
type plannedStrike struct {
	mockengine.Strike
	node int
}

// plan decides at each request that is handed in whether somebody is to be killed or paused about now.
func (r *replay) plan(ctx context.Context) {
	due := func(every int) bool { return every > 0 && r.dealt%every == 0 }
	blow := func(agent bool, node int) {
		s := mockengine.Strike{Agent: agent, Middle: r.rng.IntN(3) == 0, After: r.rng.IntN(strikeSpread)}
		r.strikes = append(r.strikes, plannedStrike{s, node})
	}
	if due(r.set.killEngine) {
		blow(false, 0)
	}
	if due(r.set.killAgent) {
		blow(true, r.turns.killAgent.next())
	}
	if due(r.set.killMover) {
		r.killMover(ctx, r.nodes[r.turns.killMover.next()])
	}
	if due(r.set.pauseAgent) && r.nodes[r.turns.pauseAgent.next()].pause(ctx, r.set.pauseFor) {
		r.count(&r.tally.pauses, 0)
	}
	if due(r.set.pauseEngine) {
		r.pauseEngine(ctx)
	}
	if due(r.set.killHelper) {
		r.strikeHelper(ctx, r.nodes[r.turns.killHelper.next()], false)
	}
	if due(r.set.pauseHelper) {
		r.strikeHelper(ctx, r.nodes[r.turns.pauseHelper.next()], true)
	}
	if due(r.set.killServer) {
		r.killServer(ctx)
	}
	if due(r.set.pauseServer) {
		r.pauseServer(ctx)
	}
}

// turn is whose turn it is: one node after the other, from one that was drawn.
type turn struct{ at, of int }

func (t *turn) next() int {
	t.at = (t.at + 1) % t.of
	return t.at
}

// turns are the turns of what hits agents and what is theirs.
type turns struct{ killAgent, killMover, pauseAgent, killHelper, pauseHelper turn }

// newTurns draws where each begins.
func newTurns(rng *rand.Rand, nodes int) (t turns) {
	for _, one := range []*turn{&t.killAgent, &t.killMover, &t.pauseAgent, &t.killHelper, &t.pauseHelper} {
		*one = turn{rng.IntN(nodes), nodes}
	}
	return t
}

// nextStrike takes a planned strike and the engine that is to deal it, at a moment when a job is
// under way. Some are dealt blindly instead, whatever the victim does, and to agents and engines
// whose agent stands still, as long as at least half of all are known to hit a job under way.
func (r *replay) nextStrike() (s *plannedStrike, by *replayEngine, blind bool) {
	if len(r.strikes) == 0 {
		return nil, nil, false
	}
	e := r.engines[r.rng.IntN(len(r.engines))]
	if next := &r.strikes[0]; next.Agent { // an engine strikes the agent that it has
		e = r.engines[next.node+len(r.nodes)*r.rng.IntN((len(r.engines)-next.node-1)/len(r.nodes)+1)]
	}
	r.tally.Lock()
	spare := 2*r.tally.inFlight >= r.tally.engineKills+r.tally.agentKills+1
	r.tally.Unlock()
	paused := r.node(e.number).isPaused() // then no job is under way soon
	if e.strike != nil || e.process.wanted || paused && !spare {
		return nil, nil, false
	}
	s = &r.strikes[0]
	r.strikes = r.strikes[1:]
	return s, e, spare && (paused || r.rng.IntN(blindShare) == 0)
}

// blindKill kills at any moment.
func (r *replay) blindKill(ctx context.Context, s *plannedStrike, victim *replayEngine) {
	time.Sleep(time.Duration(r.rng.IntN(3000)) * time.Microsecond)
	if s.Agent {
		a := r.nodes[s.node]
		r.replaceAgent(ctx, a, a.current())
		return
	}
	r.count(&r.tally.engineKills, 0)
	victim.process.wanted = true
	victim.process.child.signal(syscall.SIGKILL)
}

// struck takes the report of a strike that was dealt. The agent that it hit is the one whose
// process the engine names; one that has ended meanwhile was hit by somebody else, and another one
// runs in its place.
func (r *replay) struck(ctx context.Context, e *replayEngine, pid int) error {
	s := e.strike
	if s == nil {
		return fmt.Errorf("engine %d struck though nobody had asked", e.number)
	}
	e.strike = nil
	if s.Agent {
		for _, a := range r.nodes {
			if c := a.current(); c != nil && c.process.Pid == pid && r.replaceAgent(ctx, a, c) {
				r.count(new(int), 1)
			}
		}
		return nil
	}
	r.count(&r.tally.engineKills, 1)
	e.process.wanted = true
	return nil
}

func (r *replay) count(n *int, inFlight int) {
	r.tally.Lock()
	defer r.tally.Unlock()
	*n++
	r.tally.inFlight += inFlight
}

// replaceAgent ends a life of an agent and starts the next one. Engines go on meanwhile. False: it
// is being replaced already.
func (r *replay) replaceAgent(ctx context.Context, a *replayAgent, c *agentLife) bool {
	if !a.expectDeath(c) {
		return false
	}
	r.count(&r.tally.agentKills, 0)
	r.around.kill(r.dealt)
	if r.set.dramPath == "" {
		r.befell(r.dealt, r.dealt+1, func(f *mockengine.Fault) { f.PoolLost = true })
	}
	r.watch(fmt.Sprintf("the agent of node %d to end and start again", a.node), func() {
		select {
		case <-c.done:
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

// fail ends the run with an error that something beside it met; the first one counts.
func (r *replay) fail(err error) {
	select {
	case r.exits <- err:
	default:
	}
}

// befell notes for the simulation what happens to requests from to to-1, counted as they are dealt.
func (r *replay) befell(from, to int, note func(*mockengine.Fault)) {
	for i := from; i < to; i++ {
		f := r.faults[i]
		note(&f)
		r.faults[i] = f
	}
}

// buried takes the end of a process: if it was killed, another one takes its place and its requests.
func (r *replay) buried(ctx context.Context, p *engineProcess, exit error) error {
	if !p.wanted {
		return fmt.Errorf("a process of engines ended: %w\n%s", exit, p.log.String())
	}
	left := true
	for _, e := range p.engines {
		left = left && e.left != nil
	}
	if left {
		return nil
	}
	r.watchCleanup(ctx, p, time.Now())
	r.befell(r.dealt, r.dealt+1, func(f *mockengine.Fault) {
		for _, e := range p.engines {
			f.EnginesLost = append(f.EnginesLost, e.number)
		}
	})
	if err := r.spawn(p); err != nil {
		return err
	}
	for _, e := range p.engines {
		r.again(e)
	}
	return ctx.Err()
}

// again hands an engine that was started again what it had not finished. What it counted since its last report is lost;
// what it found wrong is not.
func (r *replay) again(e *replayEngine) {
	e.past.Add(&e.last)
	e.past.WrongBytes += e.lost
	e.last, e.lost = mockengine.Stats{}, 0
	if s := e.strike; s != nil {
		e.strike = nil
		r.strikes = append(r.strikes, *s) // it was not dealt: somebody else killed the process
	}
	requests := make([]mockengine.Request, 0, len(e.unfinished))
	for _, q := range e.unfinished {
		requests = append(requests, q)
	}
	sortRequests(requests)
	r.befell(r.dealt, r.dealt+1, func(f *mockengine.Fault) {
		for i := range requests {
			if n := int(requests[i].ID) - 1; n < len(r.records) {
				f.Again = append(f.Again, n)
			}
		}
	})
	if !e.running {
		e.owed = requests // it was killed between two stretches: the next one begins with them
		return
	}
	if e.left == nil {
		e.send(&mockengine.Command{Op: "run", Until: e.until, SettleMS: int(settleFaults.Milliseconds()), Requests: requests})
	}
}

// watchCleanup measures how long agents keep anything of engines that died.
func (r *replay) watchCleanup(ctx context.Context, p *engineProcess, died time.Time) {
	names := make(map[*replayAgent]map[string]bool)
	for _, e := range p.engines {
		a := r.node(e.number)
		if names[a] == nil {
			names[a] = make(map[string]bool)
		}
		names[a][fmt.Sprintf("engine-%d.%d", e.number, p.life)] = true
	}
	for a, mine := range names {
		if a.isPaused() {
			continue
		}
		pauses := a.pauses()
		r.watch(fmt.Sprintf("the agent of node %d to forget dead engines", a.node), func() {
			if a.forgets(ctx, mine, pauses) {
				r.noteCleanup(time.Since(died))
			}
		})
	}
}

// forgets waits until an agent names none of some engines any more, emptyWithin at most. False: it
// could not be seen, because the agent was killed or stopped itself.
func (a *replayAgent) forgets(ctx context.Context, names map[string]bool, pauses int) bool {
	ctx, stop := context.WithTimeout(ctx, emptyWithin)
	defer stop()
	for ctx.Err() == nil && a.pauses() == pauses {
		st, err := a.status(ctx)
		if err != nil {
			return false
		}
		if !anyInstance(st, names) {
			break
		}
		time.Sleep(agentPoll)
	}
	return a.pauses() == pauses
}

func anyInstance(st admin.Status, names map[string]bool) bool {
	for _, e := range st.EngineList {
		if names[e.Instance] {
			return true
		}
	}
	return false
}

func (r *replay) noteCleanup(d time.Duration) {
	r.tally.Lock()
	defer r.tally.Unlock()
	r.tally.cleanup = max(r.tally.cleanup, d)
}
