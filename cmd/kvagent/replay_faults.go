package main

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/kvagent/kvagent/agent"
	"github.com/kvagent/kvagent/mockengine"
)

// plan decides at each request that is handed in whether somebody is to be killed or paused about now.
func (r *replay) plan() {
	due := func(every int) bool { return every > 0 && r.dealt%every == 0 }
	blow := func(agent bool) {
		r.strikes = append(r.strikes, mockengine.Strike{Agent: agent, Middle: r.rng.IntN(3) == 0, After: r.rng.IntN(strikeSpread)})
	}
	if due(r.set.killEngine) {
		blow(false)
	}
	if due(r.set.killAgent) {
		blow(true)
	}
	if due(r.set.killMover) {
		r.killMover()
	}
	if due(r.set.pauseAgent) {
		r.tally.Lock()
		r.tally.pauses++
		r.tally.Unlock()
		r.agent.pause(context.Background(), r.set.pauseFor)
	}
}

// nextStrike takes a planned strike and the engine that is to deal it, at a moment when a job is under way. Some are
// dealt blindly instead, whatever the victim does, as long as at least half of all are known to hit a job under way.
func (r *replay) nextStrike() (s *mockengine.Strike, by *replayEngine, blind bool) {
	e := r.engines[r.rng.IntN(len(r.engines))]
	if len(r.strikes) == 0 || e.strike != nil || e.process.wanted || r.agent.isPaused() {
		return nil, nil, false
	}
	s = &r.strikes[0]
	r.strikes = r.strikes[1:]
	r.tally.Lock()
	defer r.tally.Unlock()
	spare := 2*r.tally.inFlight >= r.tally.engineKills+r.tally.agentKills+1
	return s, e, spare && r.rng.IntN(blindShare) == 0
}

// blindKill kills at any moment.
func (r *replay) blindKill(s *mockengine.Strike, victim *replayEngine) {
	time.Sleep(time.Duration(r.rng.IntN(3000)) * time.Microsecond)
	if s.Agent {
		r.replaceAgent(true)
		return
	}
	r.count(&r.tally.engineKills, 0)
	victim.process.wanted = true
	_ = victim.process.cmd.Process.Signal(syscall.SIGKILL)
}

// struck takes the report of a strike that was dealt.
func (r *replay) struck(e *replayEngine) error {
	s := e.strike
	if s == nil {
		return fmt.Errorf("engine %d struck though nobody had asked", e.number)
	}
	e.strike = nil
	if s.Agent {
		if r.replaceAgent(false) {
			r.count(new(int), 1)
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

// replaceAgent waits for the agent's death, or brings it about, and starts another one. Engines go on meanwhile. False:
// it is being replaced already.
func (r *replay) replaceAgent(kill bool) bool {
	gone, end := r.agent.expectDeath()
	if gone == nil {
		return false
	}
	r.count(&r.tally.agentKills, 0)
	r.around.kill(r.dealt)
	if r.set.dramPath == "" {
		r.befell(r.dealt, r.dealt+1, func(f *mockengine.Fault) { f.PoolLost = true })
	}
	if kill {
		end()
	}
	r.watching.Go(func() {
		<-gone
		if err := r.agent.start(context.Background()); err != nil {
			select {
			case r.agent.exits <- fmt.Errorf("start the agent again: %w", err):
			default:
			}
		}
	})
	return true
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
	r.watchCleanup(p, time.Now())
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
	if e.left == nil && e.running {
		e.send(&mockengine.Command{Op: "run", Until: e.until, SettleMS: int(settleFaults.Milliseconds()), Requests: requests})
	}
}

// watchCleanup measures how long the agent keeps anything of engines that died.
func (r *replay) watchCleanup(p *engineProcess, died time.Time) {
	if r.agent.isPaused() {
		return
	}
	names := make(map[string]bool)
	for _, e := range p.engines {
		names[fmt.Sprintf("engine-%d.%d", e.number, p.life)] = true
	}
	pauses := r.agent.pauses()
	r.watching.Go(func() {
		ctx, stop := context.WithTimeout(context.Background(), emptyWithin)
		defer stop()
		for ctx.Err() == nil && r.agent.pauses() == pauses {
			st, err := r.agent.status(ctx)
			if err != nil {
				return // it was killed itself
			}
			if !anyInstance(st, names) {
				break
			}
			time.Sleep(agentPoll)
		}
		if r.agent.pauses() == pauses { // who is stopped cannot clean up
			r.noteCleanup(time.Since(died))
		}
	})
}

func anyInstance(st agent.Status, names map[string]bool) bool {
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
