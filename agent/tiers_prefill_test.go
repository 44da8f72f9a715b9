package agent

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
)

// Steps that follow on each other tell their time; the first, one behind a gap, and one of several saves tell no more than they know.
func TestStepPace(t *testing.T) {
	var p stepPace
	at := time.Unix(1000, 0)
	for i, c := range []struct {
		step     uint64
		tokens   int
		after    time.Duration // the save before
		computed int
		took     time.Duration
	}{
		{7, 100, 0, 0, 0},
		{7, 28, time.Millisecond, 0, 0},              // the first step seen: nobody knows when it began
		{8, 512, 99 * time.Millisecond, 0, 0},        // step 7 is over
		{8, 512, time.Millisecond, 0, 0},             // its second save
		{9, 64, 199 * time.Millisecond, 1024, 100e6}, // step 8 took from the first save of 7 to its own
		{12, 700, time.Second, 64, 200e6},            // step 9; what lies before step 12 is not known
		{13, 16, 50 * time.Millisecond, 0, 0},
		{14, 16, 10 * time.Millisecond, 16, 50e6},
		{3, 1, time.Second, 16, 10e6}, // an engine that begins again
		{4, 1, time.Second, 0, 0},
	} {
		at = at.Add(c.after)
		computed, took := p.saved(c.step, c.tokens, at)
		if computed != c.computed || took != c.took {
			t.Errorf("save %d, of step %d: %d tokens in %v, want %d in %v", i, c.step, computed, took, c.computed, c.took)
		}
	}
}

// What a worker saves step after step tells the tiers how fast its engine computes, and /status says so.
func TestPrefillIsLearnedFromSaves(t *testing.T) {
	r := newRig(t, withTiers(tier.Tier{Name: "shared", Store: pooltest.NewShelf()}), func(c *rigConfig) { c.learn = true })
	_, workers, answer := r.joinEngine(register("engine"))
	w := workers[0]
	const blocks = 16 // of 16 tokens: as many as a step must have to count
	for step := range uint64(18) {
		if got := r.agent.Status().Tiers.Prefill; step < 17 && got != 0 {
			t.Fatalf("%.0f tokens a second are learned before step %d", got, step)
		}
		w.job++
		w.send(&ipc.Save{
			Job: w.job, Epoch: answer.Epoch, Step: 100 + step, Event: ipc.None, Revoke: ipc.None, Sections: []ipc.Section{section(chain(byte(step), blocks), 0)},
		})
		w.sync() // it has been read; that it waits for its step does not matter here
	}
	if got := r.agent.Status().Tiers.Prefill; got < 1 {
		t.Errorf("%.0f tokens a second are learned from 17 steps", got)
	}
}
