package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/settings"
)

// progress shows the progress of a replay, a line a second.
type progress struct {
	set    *scenario
	out    io.Writer // the result
	log    io.Writer // the progress
	ticker *time.Ticker
}

func newProgress(s *scenario, out, log io.Writer) *progress {
	p := &progress{set: s, out: out, log: out}
	if s.json {
		p.log = log
	}
	if !s.progress {
		return p
	}
	p.ticker = time.NewTicker(time.Second)
	return p
}

// tick returns the channel of the next line; nil without progress.
func (p *progress) tick() <-chan time.Time {
	if p.ticker == nil {
		return nil
	}
	return p.ticker.C
}

// line shows the progress.
func (p *progress) line(r *replay) {
	var s mockengine.Stats
	blocks, hits := 0, 0
	for _, e := range r.engines {
		one := e.stats()
		s.Add(&one)
		blocks += e.blocks
		hits += e.own + e.pooled
	}
	fmt.Fprintf(p.log, "%6s of %s requests   hit rate %5.1f %%   %7.2f GB moved   %3.0f s\n",
		settings.Thousands(r.done), settings.Thousands(len(r.records)),
		100*ratio(hits, blocks), float64(s.BytesSaved+s.BytesLoaded)/1e9, time.Since(r.begin).Seconds())
}

// end prints the result.
func (p *progress) end(r *replay, o *Report) {
	if p.ticker != nil {
		p.ticker.Stop()
		p.line(r)
	}
	if p.set.json {
		body, err := json.MarshalIndent(o, "", "  ")
		if err == nil {
			fmt.Fprintf(p.out, "%s\n", body)
		}
		return
	}
	p.table(r, o)
}

// table prints one line for each engine, and the totals.
func (p *progress) table(r *replay, o *Report) {
	fmt.Fprintln(p.out)
	w := tabwriter.NewWriter(p.out, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w,
		"engine\trequests\tprompt blocks\town hits\tpool hits\tof another engine\tcomputed\tsaved\tloaded\tmoved\t")
	var all engine
	var sum mockengine.Stats
	for _, e := range r.engines {
		s := e.stats()
		if len(r.engines) <= 16 {
			row(w, fmt.Sprint(e.number), e, &s)
		}
		all.requests += e.requests
		all.blocks += e.blocks
		all.own += e.own
		all.pooled += e.pooled
		all.others += e.others
		sum.Add(&s)
	}
	row(w, "all", &all, &sum)
	_ = w.Flush() // to standard output: an error cannot be reported
	fmt.Fprintf(p.out, "\n%.1f %% of all prompt blocks were not computed again (simulation of the same caches, "+
		"without faults: %.1f %%).\n", 100*o.HitRate, 100*o.SimHitRate)
	fmt.Fprintf(p.out, "%s blocks compared byte for byte: %s. %s requests failed.\n",
		settings.Thousands(int(o.BlocksVerified)), wrongText(o.WrongBytes), settings.Thousands(o.FailedRequests))
	if p.set.anyFault() {
		fmt.Fprint(p.out, "Faults:")
		for _, one := range p.set.faults(&o.Faults) {
			if *one.every > 0 {
				fmt.Fprintf(p.out, " %s %d,", one.name, *one.count)
			}
		}
		fmt.Fprintf(p.out, " of them %d kills with a copy in flight; longest clean-up %.0f ms.\n",
			o.KillsInFlight+o.MoverInFlight, o.CleanupMaxMS)
	}
	if len(o.Sources) > 1 {
		fmt.Fprintf(p.out, "Blocks loaded from: %s.\n", sourcesText(o.Sources))
	}
	fmt.Fprintf(p.out, "%.1f s, seed %d.\n", o.WallS, o.Seed)
	if p.set.socket == "" && o.stopErr == nil {
		fmt.Fprintln(p.out, "The agent stopped cleanly; nothing is left.")
	}
}

func row(w io.Writer, name string, e *engine, s *mockengine.Stats) {
	fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%.2f GB\t\n", name, settings.Thousands(e.requests),
		settings.Thousands(e.blocks), settings.Thousands(e.own), settings.Thousands(e.pooled),
		settings.Thousands(e.others), settings.Thousands(e.blocks-e.own-e.pooled),
		settings.Thousands(int(s.BlocksSaved)), settings.Thousands(int(s.BlocksLoaded)),
		float64(s.BytesSaved+s.BytesLoaded)/1e9)
}

func wrongText(n uint64) string {
	if n == 0 {
		return "no byte was wrong"
	}
	return settings.Thousands(int(n)) + " BYTES WERE WRONG"
}

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
