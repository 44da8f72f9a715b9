package main

import (
	"testing"
	"time"
)

// A pool in a file outlives the agent's kills: the hits are those of a pool that was never lost, but for the requests that
// found no agent. warmLeast is the share of the simulated hits that must
// be there.
func TestReplayKeepsItsPool(t *testing.T) {
	t.Parallel()
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

// An engine hits what an agent had that was killed, within two seconds of the next one's start on a machine that has nothing else to do: one of some
// tries must be within them.
func TestWarmWithinTwoSeconds(t *testing.T) {
	const within, tries = 2 * time.Second, 5
	var took []time.Duration
	for range tries {
		took = append(took, warmAfter(t))
		if took[len(took)-1] <= within {
			return
		}
	}
	t.Errorf("blocks of the agent before were loaded after %v, allowed: %v", took, within)
}

// warmAfter is the time from the start of an agent to the first load of what one that was killed had stored.
func warmAfter(t *testing.T) time.Duration {
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
	defer func() { _ = next.Process.Kill(); _ = next.Wait() }() // nobody needs its end
	waitStatus(t, dir, "blocks_stored", func(n float64) bool { return n > 0 })
	if out, err := kvagentCommand(t, mock...).CombinedOutput(); err != nil {
		t.Fatalf("mock: %v\n%s", err, out)
	}
	waitStatus(t, dir, "blocks_loaded", func(n float64) bool { return n > 0 })
	return time.Since(began)
}
