package tier

import (
	"context"
	"fmt"
	"strings"

	"github.com/kvagent/kvagent/pool"
)

// Report implements pool.Tiers.
func (p *Pool) Report() pool.TierReport {
	p.mu.Lock()
	r := pool.TierReport{
		Promises:     len(p.mu.open),
		PromiseBytes: p.mu.bytes,
		PromiseCap:   p.o.PrefetchBytes,
		Promised:     p.mu.promised,
		Fulfilled:    p.mu.installed,
		Failed:       p.mu.failed,
		Cancelled:    p.mu.dropped,
		Expired:      p.mu.expired,
		Tiers:        make([]pool.TierStatus, len(p.levels)),
	}
	now := p.now()
	for i, l := range p.levels {
		t := &r.Tiers[i]
		t.Fetching, t.Hinted, t.Putting, t.Deleting = l.fetches.n, l.hints.n, l.puts.len(), len(l.deletes)
		if now.Before(l.fullUntil) {
			t.State = "full"
		}
	}
	p.mu.Unlock()
	p.names.Report(&r)
	for i, l := range p.levels {
		l.report(&r.Tiers[i])
	}
	return r
}

func (l *level) report(t *pool.TierStatus) {
	c := &l.count
	t.Name, t.Write, t.Local, t.Usage = l.Name, l.Write.String(), l.Local, l.Store.Usage()
	if says, can := l.Store.(pool.Reporter); can {
		t.Store = says.Report()
	}
	state, opened, tries, _, err := l.breaker.state()
	if state != "up" || t.State == "" {
		t.State = state
	}
	t.Up = t.State == "up" || t.State == "full"
	if state != "up" && err != nil {
		t.Error = err.Error()
	}
	t.Opened, t.Tries = opened, tries
	t.Hits, t.Misses, t.BytesIn, t.BytesOut = c.hits.Load(), c.misses.Load(), c.bytesIn.Load(), c.bytesOut.Load()
	t.Corrupt, t.Timeouts, t.Errors = c.corrupt.Load(), c.timeouts.Load(), c.errors.Load()
	t.Stored, t.Had, t.Full, t.Lost = c.stored.Load(), c.had.Load(), c.full.Load(), c.lost.Load()
	t.Dropped, t.Deleted, t.DeletesLost = c.putsDropped.Load(), c.deleted.Load(), c.deletesDropped.Load()
	t.Asked, t.Found = c.asked.Load(), c.found.Load()
	t.AskLate, t.AskFailed, t.AskRefused = c.askTimeouts.Load(), c.askFailed.Load(), c.askBusy.Load()
	t.Rate, t.FetchSeconds, t.PutSeconds, t.AskSeconds = l.speed.report()
}

// StoredAs implements pool.Tiers.
func (p *Pool) StoredAs(space pool.Fingerprint) pool.Fingerprint { return p.names.StoredAs(space) }

// ListTier implements pool.Tiers.
func (p *Pool) ListTier(ctx context.Context, tier string, found func(k pool.Key, bytes int64) bool) error {
	l, err := p.levelNamed(tier)
	if err != nil {
		return err
	}
	lister, ok := l.Store.(pool.Lister)
	if !ok {
		return fmt.Errorf("tier %s: %w", tier, pool.ErrUnlisted)
	}
	if err := lister.List(ctx, found); err != nil {
		return fmt.Errorf("tier %s: %w", tier, err)
	}
	return nil
}

// DeleteIn implements pool.Tiers. It also clears what is cached about the tier.
func (p *Pool) DeleteIn(ctx context.Context, tier string, keys []pool.Key) error {
	l, err := p.levelNamed(tier)
	if err != nil {
		return err
	}
	err = l.Store.Delete(ctx, keys)
	l.exists.clear()
	l.written.clear()
	if err != nil {
		return fmt.Errorf("tier %s: %w", tier, err)
	}
	return nil
}

func (p *Pool) levelNamed(name string) (*level, error) {
	var names []string
	for _, l := range p.levels {
		if l.Name == name {
			return l, nil
		}
		names = append(names, l.Name)
	}
	return nil, fmt.Errorf("tier %q: %w, allowed: %s", name, pool.ErrNoTier, strings.Join(names, ", "))
}

// clear removes all entries.
func (k *existsCache) clear() {
	k.mu.Lock()
	defer k.mu.Unlock()
	clear(k.cells)
}
