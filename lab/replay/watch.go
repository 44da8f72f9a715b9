package replay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// watches counts the background work of a replay, by what it waits for.
type watches struct {
	mu     sync.Mutex
	next   int
	active map[int]string
}

func (w *watches) begin(what string) (number int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.active == nil {
		w.active = make(map[int]string)
	}
	w.next++
	w.active[w.next] = what
	return w.next
}

func (w *watches) end(number int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.active, number)
}

// list returns what the replay waits for.
func (w *watches) list() (all []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, what := range w.active {
		all = append(all, what)
	}
	slices.Sort(all)
	return all
}

// watch runs f in the background. The error of a stalled replay names what f waits for. f ends soon
// after the run's context.
func (r *replay) watch(what string, f func()) {
	number := r.watches.begin(what)
	r.watching.Go(func() {
		defer r.watches.end(number)
		f()
	})
}

// awaitWatches waits until no background work is left, and no agent is stopped.
func (r *replay) awaitWatches(ctx context.Context) error {
	over := make(chan struct{})
	go func() { // it ends with the watches and the pauses, which the run waits for in the end
		r.watching.Wait()
		for _, a := range r.nodes {
			a.pausing.Wait()
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
	waits = append(waits, r.watches.list()...)
	for _, a := range r.nodes {
		if a.isPaused() {
			waits = append(waits, fmt.Sprintf("the agent of node %d to be let go on", a.node))
		}
	}
	return errors.New("stalled-after: nothing was reported for " + r.set.stalledAfter.String() + "; waiting for " +
		"" + strings.Join(waits, ", "))
}

// lagEvery is the wait whose lateness measures what the machine adds to every deadline.
const lagEvery = 2 * time.Millisecond

// lag measures how late short waits end in the replay's own process. Look-ups that an agent on the
// same machine answers too late are compared with it, because no agent can answer without a
// processor.
type lag struct {
	stop chan struct{}
	done chan struct{}
	max  time.Duration // valid when done is closed
}

func startLag(ctx context.Context) *lag {
	l := &lag{stop: make(chan struct{}), done: make(chan struct{})}
	go l.run(ctx)
	return l
}

func (l *lag) run(ctx context.Context) {
	defer close(l.done)
	t := time.NewTimer(lagEvery)
	defer t.Stop()
	for from := time.Now(); ; {
		select {
		case <-t.C:
			l.max = max(l.max, time.Since(from)-lagEvery)
			from = time.Now()
			t.Reset(lagEvery)
		case <-l.stop:
			return
		case <-ctx.Done():
			return
		}
	}
}

// end stops the measurement and returns the latest end of a wait.
func (l *lag) end() time.Duration {
	close(l.stop)
	<-l.done
	return l.max
}
