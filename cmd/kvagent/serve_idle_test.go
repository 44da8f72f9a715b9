package main

import (
	"context"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// An agent is idle 15 minutes after its start, or after its last session, however short that was.
func TestUntilIdle(t *testing.T) {
	const limit = 15 * time.Minute
	synctest.Test(t, func(t *testing.T) {
		var open, newest atomic.Int64
		begin, over := time.Now(), make(chan time.Duration, 1)
		wait := func(ctx context.Context) {
			if untilIdle(ctx, limit, func() (int, uint64) { return int(open.Load()), uint64(newest.Load()) }) {
				over <- time.Since(begin)
			}
		}
		check := func(what string, last time.Duration) {
			t.Helper()
			if got := <-over; got < last+limit || got > last+limit+idleLook {
				t.Errorf("%s: idle after %v, want %v", what, got, last+limit)
			}
		}
		go wait(t.Context())
		check("no session at all", 0)

		begin = time.Now()
		go wait(t.Context())
		time.Sleep(limit - time.Minute)
		open.Store(2)
		newest.Store(2)
		time.Sleep(10 * limit)
		open.Store(1)
		time.Sleep(10 * limit)
		open.Store(0)
		last := time.Since(begin)
		time.Sleep(limit - time.Minute + time.Millisecond)
		newest.Add(1) // between two looks
		check("sessions", max(last, time.Since(begin)))

		ctx, cancel := context.WithCancel(t.Context())
		go wait(ctx)
		cancel()
		synctest.Wait()
		if len(over) != 0 {
			t.Error("an agent that ends otherwise is idle")
		}
	})
}

// With --end-idle the agent ends in order, as after a signal.
func TestServeEndsIdle(t *testing.T) {
	out, code := kvagentOutput(t, "serve", "--socket-dir", filepath.Join(t.TempDir(), "s"), "--pool", "1MiB",
		"--end-idle", "1ms")
	for _, said := range []string{"ready", "no session has been open", "draining"} {
		if code != 0 || !strings.Contains(out, said) {
			t.Errorf("ended with %d, and does not say %q: %s", code, said, out)
		}
	}
}
