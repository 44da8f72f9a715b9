package main

import (
	"testing"
	"time"
)

// A pool in a file outlives the agent's kills: the hits are those of a pool that was never lost, but for the requests that
// found no agent. warmLeast is the share of the simulated hits that must
// be there.
func TestReplayKeepsItsPool(t *testing.T) {
	const warmLeast = 0.9
	o := replayJSON(t, "--requests", "600", "--kill-agent-every", "150", "--dram-path", poolFile(t))
	o.clean(t)
	if o.AgentKills < 3 {
		t.Errorf("%d kills", o.AgentKills)
	}
	if o.HitRate < warmLeast*o.SimHitRate || o.SimHitRate == 0 {
		t.Errorf("hit rate %.4f, the simulation says %.4f", o.HitRate, o.SimHitRate)
	}
	if o.BlocksHitPool < o.BlocksHitOwn {
		t.Errorf("%d hits in the pool, %d in the engines' own caches: the pool was lost", o.BlocksHitPool, o.BlocksHitOwn)
	}
}

// An engine hits what an agent had that was killed, within two seconds of the next one's start.
func TestWarmWithinTwoSeconds(t *testing.T) {
	const within = 2 * time.Second
	path := poolFile(t)
	cmd, dir, _ := startServe(t, "--dram-path", path)
	mock := []string{"mock", "--socket-dir", dir, "--requests", "40", "--block-bytes", "4096", "--seed", "3"}
	if out, err := kvagentCommand(t, mock...).CombinedOutput(); err != nil {
		t.Fatalf("mock: %v\n%s", err, out)
	}
	_ = cmd.Process.Kill() // it is a child
	_ = cmd.Wait()         // it was killed
	began := time.Now()
	next := kvagentCommand(t, "serve", "--socket-dir", dir, "--pool", "16MiB", "--dram-path", path)
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = next.Process.Kill(); _ = next.Wait() }) // nobody needs its end
	waitStatus(t, dir, "blocks_stored", func(n float64) bool { return n > 0 })
	if out, err := kvagentCommand(t, mock...).CombinedOutput(); err != nil {
		t.Fatalf("mock: %v\n%s", err, out)
	}
	waitStatus(t, dir, "blocks_loaded", func(n float64) bool { return n > 0 })
	if d := time.Since(began); d > within {
		t.Errorf("blocks of the agent before were loaded after %v, allowed: %v", d, within)
	}
}
