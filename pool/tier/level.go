package tier

import (
	"container/list"
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// level is one tier at work: its queues and the goroutines that serve them.
type level struct {
	Tier
	p       *Pool
	number  int
	exists  existsCache // which entries a shared store has
	written existsCache // entries that were stored there lately, not to be offered again
	breaker breaker
	count   counts
	logged  logLimiter

	trouble   chan struct{} // cap 1: the breaker opened, or the store is full
	questions chan *question
	asking    asking

	// The following fields are under Pool.mu. wake is signalled when there is work.
	wake      *sync.Cond
	fetches   list.List  // promises, oldest first
	removals  []pool.Key // of damaged values, at most removalQueue
	puts      putQueue
	writers   int // workers that are writing or removing
	fullUntil time.Time
}

// counts are the counters of a tier. Their lock is a leaf.
type counts struct {
	mu  sync.Mutex
	now pool.TierStatus
}

func (c *counts) add(do func(t *pool.TierStatus)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	do(&c.now)
}

// smooth adds the time since a moment to a moving average, in seconds.
func smooth(average *float64, since time.Time) {
	const weight = 0.2 // of a new value
	now := time.Since(since).Seconds()
	if *average == 0 {
		*average = now
	}
	*average += weight * (now - *average)
}

func (p *Pool) newLevel(number int, t Tier) (*level, error) {
	if err := t.complete(); err != nil {
		return nil, err
	}
	for _, other := range p.levels {
		if other.Name == t.Name {
			return nil, errors.New("tier " + t.Name + ": Name is used twice, allowed: once")
		}
	}
	l := &level{
		Tier: t, p: p, number: number,
		trouble:   make(chan struct{}, 1),
		questions: make(chan *question, questions),
	}
	if !t.Local {
		l.exists = newExistsCache(cacheEntries)
	}
	l.written = newExistsCache(cacheEntries)
	l.asking.open = make(map[uint64]*question)
	l.puts.set = make(map[entryKey]*era)
	l.breaker.closed.Store(true)
	l.wake = sync.NewCond(&p.mu)
	return l, nil
}

// up reports whether the breaker lets calls to the store through.
func (l *level) up() bool { return l.breaker.closed.Load() }

// work runs a worker until the pool closes.
func (l *level) work(ctx context.Context) {
	for {
		fetch, remove, put := l.next()
		switch {
		case len(fetch) > 0:
			l.fetch(ctx, fetch)
		case len(remove) > 0:
			l.remove(ctx, remove)
			l.doneWriting()
		case len(put) > 0:
			l.write(ctx, put)
			l.doneWriting()
		default:
			return
		}
	}
}

// next waits for work: fetches before removals before puts; none: the pool closes.
func (l *level) next() (fetch []*promise, remove []pool.Key, put []origin) {
	p := l.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.mu.closed {
		if batch := p.takeFetchesLocked(l); len(batch) > 0 {
			return batch, nil, nil
		}
		if l.up() && l.writers < max(l.Workers/2, 1) {
			if n := min(len(l.removals), l.BatchItems); n > 0 {
				l.writers++
				remove, l.removals = l.removals[:n:n], l.removals[n:]
				return nil, remove, nil
			}
			if l.puts.len() > 0 && !p.now().Before(l.fullUntil) {
				l.writers++
				return nil, nil, l.puts.take(l)
			}
		}
		l.wake.Wait()
	}
	return nil, nil, nil
}

// doneWriting ends a write or a removal.
func (l *level) doneWriting() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.writers--
	l.wake.Signal()
}

// countResult counts the outcome of a call to the store, and opens the breaker.
func (l *level) countResult(ctx context.Context, c call, err error) {
	switch {
	case err == nil:
		l.breaker.worked(c)
		return
	case ctx.Err() != nil:
		return // the stack is closing
	case errors.Is(err, context.DeadlineExceeded):
		l.count.add(func(t *pool.TierStatus) { t.Timeouts++ })
	default:
		l.count.add(func(t *pool.TierStatus) { t.Errors++ })
	}
	if l.breaker.failed(&l.Tier, c, err) {
		l.p.o.Log(l.Name, "the store fails: it is not used until it works again", err)
		l.p.storage.noteAll()
		l.signal()
	}
}

func (l *level) signal() {
	select {
	case l.trouble <- struct{}{}:
	default:
	}
}

// monitor waits until the breaker opens or the store is full, and brings it back into use.
func (l *level) monitor(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.trouble:
		}
		if !l.up() {
			l.p.requeueAll(l)
			l.reconnect(ctx)
		}
		l.waitRoom(ctx)
		l.wake.Broadcast()
	}
}

// reconnect tries the store with growing pauses until it answers.
func (l *level) reconnect(ctx context.Context) {
	for {
		_, _, pause, _ := l.breaker.state()
		if !pauseFor(ctx, pause) {
			return
		}
		if l.breaker.try(&l.Tier, func() error { return l.probe(ctx) }) == nil {
			l.p.o.Log(l.Name, "the store works again", nil)
			l.p.storage.noteAll()
			return
		}
	}
}

// probe asks the store for a random key.
func (l *level) probe(ctx context.Context) error {
	key := pool.Key{Hash: pool.Hash{Len: pool.MaxHashLen}}
	_, _ = rand.Read(key.Hash.Bytes[:]) // never fails
	ctx, stop := context.WithTimeout(ctx, l.AskWithin)
	defer stop()
	return l.Store.Exists(ctx, []pool.Key{key}, make([]pool.Status, 1))
}

// waitRoom waits until a full store may be written to again.
func (l *level) waitRoom(ctx context.Context) {
	l.p.mu.Lock()
	left := l.fullUntil.Sub(l.p.now())
	l.p.mu.Unlock()
	if left > 0 {
		pauseFor(ctx, left)
	}
}

// full stops writes to a full store for fullPause.
func (l *level) full() {
	l.p.mu.Lock()
	l.fullUntil = l.p.now().Add(fullPause)
	l.p.mu.Unlock()
	l.signal()
}

// pauseFor waits for d. It returns false if the context ended first.
func pauseFor(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// logLimiter bounds how often a message about a tier is logged.
type logLimiter struct {
	mu   sync.Mutex
	last map[string]time.Time
}

// logLimited logs a message at most once per logEvery.
func (l *level) logLimited(what string, err error) {
	now := l.p.now()
	l.logged.mu.Lock()
	if l.logged.last == nil {
		l.logged.last = make(map[string]time.Time)
	}
	quiet := now.Sub(l.logged.last[what]) < logEvery
	if !quiet {
		l.logged.last[what] = now
	}
	l.logged.mu.Unlock()
	if !quiet {
		l.p.o.Log(l.Name, what, err)
	}
}
