package replay

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// watch runs f in the background. The error of a stalled replay names what f waits for. f ends soon
// after the run's context.
func (r *replay) watch(what string, f func()) {
	key := new(int)
	r.watches.Store(key, what)
	r.watching.Go(func() {
		defer r.watches.Delete(key)
		f()
	})
}

// awaitWatches waits until no background work is left, and no agent is stopped.
func (r *replay) awaitWatches(ctx context.Context) error {
	over := make(chan struct{})
	go func() { // it ends with the watches and the pauses, which the run waits for in the end
		r.watching.Wait()
		for _, d := range r.daemons() {
			d.pausing.Wait()
		}
		close(over)
	}()
	limit := time.NewTimer(r.set.stalledAfter)
	defer limit.Stop()
	select {
	case <-over:
		return nil
	case err := <-r.exits:
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-limit.C:
		return r.stalled("leave", func(*engine) bool { return true })
	}
}

// stalled returns the error of a stalled replay: what it waits for.
func (r *replay) stalled(what string, ready func(*engine) bool) error {
	var waits []string
	for _, e := range r.engines {
		if !ready(e) {
			waits = append(waits, fmt.Sprintf("engine %d (process %d, node %d, %d requests not over) to %s",
				e.number, e.child.OS.Pid, e.number%len(r.nodes), len(e.unfinished), what))
		}
	}
	r.watches.Range(func(_, what any) bool {
		waits = append(waits, what.(string))
		return true
	})
	for _, d := range r.daemons() {
		if d.isPaused() {
			waits = append(waits, d.name+" to be let go on")
		}
	}
	return fmt.Errorf("stalled-after: nothing was reported for %v; waiting for %s", r.set.stalledAfter,
		strings.Join(waits, ", "))
}

// lagEvery is the wait whose lateness measures what the machine adds to every deadline.
const lagEvery = 2 * time.Millisecond

// measureLag measures how late short waits end in the replay's own process, until end is called,
// which returns the latest. Look-ups that an agent on the same machine answers too late are
// compared with it, because no agent can answer without a processor.
func measureLag(ctx context.Context) (end func() time.Duration) {
	ctx, stop := context.WithCancel(ctx)
	done := make(chan time.Duration, 1)
	go func() {
		var most time.Duration
		for ctx.Err() == nil {
			from := time.Now()
			sleepUntil(ctx, nil, lagEvery)
			most = max(most, time.Since(from)-lagEvery)
		}
		done <- most
	}()
	return func() time.Duration {
		stop()
		return <-done
	}
}
