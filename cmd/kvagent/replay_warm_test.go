package main

import (
	"testing"
	"time"
)

// A pool in a file outlives the agent's kills: the hits are those of a pool that was never lost,
// but for the requests that found no agent. warmLeast is the share of the hits of a simulation
// without kills that must be there; of a pool that is lost with its agent it is 0.3.
func TestReplayKeepsItsPool(t *testing.T) {
	figures(t)
	const warmLeast = 0.6
	o := replayJSON(t, "requests: 600", "kill-agent-every: 150", "dram-path: "+poolFile(t))
	o.clean(t)
	if o.AgentKills < 3 {
		t.Errorf("%d kills", o.AgentKills)
	}
	if o.HitRate < warmLeast*o.SimHitRate || o.SimHitRate == 0 {
		t.Errorf("hit rate %.4f, the simulation says %.4f", o.HitRate, o.SimHitRate)
	}
	if o.BlocksHitPool < o.BlocksHitOwn {
		t.Errorf("%d hits in the pool, %d in the engines' own caches: the pool was lost", o.BlocksHitPool,
			o.BlocksHitOwn)
	}
}

// An engine hits what an agent had that was killed soon after the next one's start: within half as
// much again as the same took when there was nothing to find, or within two seconds where that is
// longer. One of some tries must be within them.
func TestWarmStartIsFast(t *testing.T) {
	const within, tries = 2 * time.Second, 5
	var took []time.Duration
	for range tries {
		cold, warm := coldAndWarm(t)
		took = append(took, cold, warm)
		if warm <= max(within, cold*3/2) {
			return
		}
	}
	t.Errorf("cold to the first saves and warm to the first loads in turn: %v, allowed: %v, or half as much again as "+
		"cold", took, within)
}

// coldAndWarm are the times from the start of an agent to what an engine does first with it: of one
// on an empty file to its saves, and of the next one, after a kill, to loads of what those were.
func coldAndWarm(t *testing.T) (cold, warm time.Duration) {
	path := poolFile(t)
	began := time.Now()
	cmd, dir, _ := startServe(t, "--dram-path", path)
	runMock(t, dir, "blocks_saved")
	cold = time.Since(began)
	_ = cmd.Process.Kill() // it is a child
	_ = cmd.Wait()         // it was killed
	began = time.Now()
	next := kvagentCommand(t, "serve", "--socket-dir", dir, "--pool", "16MiB", "--dram-path", path)
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = next.Process.Kill(); _ = next.Wait() }() // its result is not needed
	waitStatus(t, dir, "blocks_stored", func(n float64) bool { return n > 0 })
	runMock(t, dir, "blocks_loaded")
	return cold, time.Since(began)
}

// runMock runs an engine of which the agent counts something.
func runMock(t *testing.T, dir, count string) {
	t.Helper()
	if out, err := kvagentCommand(t, "mock", "--socket-dir", dir, "--requests", "40", "--block-bytes", "4096", "--seed",
		"3").CombinedOutput(); err != nil {
		t.Fatalf("mock: %v\n%s", err, out)
	}
	waitStatus(t, dir, count, func(n float64) bool { return n > 0 })
}
