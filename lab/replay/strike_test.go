package replay

import (
	"context"
	"math/rand/v2"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvagent/kvagent/lab/child"
)

// TestStalledNamesWatches expects the report of a stalled replay to name the tasks beside it, too.
func TestStalledNamesWatches(t *testing.T) {
	r := &replay{set: newScenario(), exits: make(chan error, 1)}
	r.set.stalledAfter = 20 * time.Millisecond
	end := make(chan struct{})
	r.watch("the agent of node 1 to end and start again", func() { <-end })
	err := r.awaitWatches(t.Context())
	if err == nil || !strings.Contains(err.Error(), "waiting for the agent of node 1 to end and start again") {
		t.Errorf("%v", err)
	}
	close(end)
	r.watching.Wait()
	r.set.stalledAfter = time.Minute
	if err := r.awaitWatches(t.Context()); err != nil {
		t.Errorf("nothing is waited for any more: %v", err)
	}
}

// TestStrikeHitsTheAgentOfItsProcess expects a wait for the agent whose process was hit, and a
// strike at an ended incarnation to hit no process.
func TestStrikeHitsTheAgentOfItsProcess(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	stop() // no incarnation follows
	r := &replay{set: newScenario(), exits: make(chan error, 1)}
	var agents []*incarnation
	for node := range 3 {
		c, err := child.Start(exec.Command("sleep", "1000"))
		if err != nil {
			t.Fatal(err)
		}
		run := newIncarnation(c)
		a := &agentProcess{node: node, daemon: daemon{exits: r.exits}}
		a.mu.child = run
		agents, r.nodes = append(agents, run), append(r.nodes, a)
		defer func() { c.Signal(syscall.SIGKILL); <-c.Done }()
	}
	strike := func(pid int) {
		e := &engine{strike: new(plannedStrike)}
		e.strike.Agent = true
		if err := r.struck(ctx, e, pid); err != nil {
			t.Fatal(err)
		}
	}
	strike(agents[1].OS.Pid) // the engine that reported it ended before it dealt it
	if !agents[1].Within(10 * time.Second) {
		t.Error("the agent that was struck lives")
	}
	if agents[0].wanted || agents[2].wanted || !agents[1].wanted {
		t.Error("another agent than the one that was struck is waited for")
	}
	next, err := child.Start(exec.Command("sleep", "1000"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { next.Signal(syscall.SIGKILL); <-next.Done }()
	r.nodes[1].mu.child = newIncarnation(next)
	strike(agents[1].OS.Pid) // reported late
	if r.nodes[1].mu.child.wanted || r.tally.AgentKills != 1 || r.tally.KillsInFlight != 1 {
		t.Errorf("a strike at an ended incarnation was taken for one at the next: %d kills, %d in flight",
			r.tally.AgentKills, r.tally.KillsInFlight)
	}
	r.watching.Wait()
}

// TestReportOfAStrikeComesLate expects that an agent that an engine killed may be gone before the
// engine's report is read, and that this ends no replay. An unexpected end does.
func TestReportOfAStrikeComesLate(t *testing.T) {
	within := reportWithin
	defer func() { reportWithin = within }()
	for _, reported := range []bool{true, false} {
		if reportWithin = time.Hour; !reported {
			reportWithin = time.Millisecond
		}
		c, err := child.Start(exec.Command("sleep", "1000"))
		if err != nil {
			t.Fatal(err)
		}
		run, told := newIncarnation(c), make(chan struct{})
		a := &daemon{struck: true, exits: make(chan error, 1)}
		a.mu.child = run
		c.Signal(syscall.SIGKILL)
		go func() { a.reportEnd(run); close(told) }()
		<-c.Done
		if reported {
			a.expectDeath(run)
		}
		<-told
		if said := len(a.exits) > 0; said == reported {
			t.Errorf("reported %v: an unexpected end was reported: %v", reported, said)
		}
	}
}

// Where movers are killed too, a strike that has waited long is dealt although no job is in flight:
// also by an engine that waits for a job to deal another one.
func TestOverdueStrikeIsDealt(t *testing.T) {
	for name, c := range map[string]struct {
		killMover, dealt int
		want             bool
	}{
		"overdue":            {25, maxStrikeWait, true},
		"not yet":            {25, maxStrikeWait - 1, false},
		"no mover is killed": {0, maxStrikeWait, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := &replay{set: newScenario(), rng: rand.New(rand.NewPCG(1, 2)), nodes: []*agentProcess{{}}}
			r.set.killMover, r.dealt = c.killMover, c.dealt
			r.engines = []*engine{{strike: &plannedStrike{}}}
			r.strikes = []plannedStrike{{}}
			s, by, blind := r.nextStrike()
			if dealt := s != nil && by == r.engines[0] && blind; dealt != c.want {
				t.Errorf("strike %v by %v, blind %v; dealt: %v, want %v", s, by, blind, dealt, c.want)
			}
		})
	}
}
