package tier

import (
	"context"
	"crypto/rand"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// lane is one tier at work: its queues, and the goroutines that empty them.
type lane struct {
	Tier
	p       *Pool
	number  int
	known   known // what a shared store has
	written known // entries it was given or had, so that they are not offered again and again
	breaker breaker
	pace    pace
	count   counts
	said    said

	copied    atomic.Int64  // bytes of staging that copies of entries about to go have
	trouble   chan struct{} // cap 1: the breaker opened, or the store is full
	questions chan *question
	asking    asking
	following following

	// Under Pool.mu; wake says that there is something to do.
	wake      *sync.Cond
	fetches   line // promises that are held
	hints     line // promises that nobody holds
	deletes   []pool.Key
	puts      puts
	writers   int // workers that write or delete now
	fullUntil time.Time
}

// counts of a tier, ever.
type counts struct {
	hits, misses                                  atomic.Uint64 // entries fetched, and not found or not usable
	bytesIn, bytesOut                             atomic.Uint64 // out of the store, and into it; shards without headers
	corrupt, timeouts, errors                     atomic.Uint64
	stored, had, full, lost                       atomic.Uint64 // entries written; there already; refused as full; not stored for another reason
	putsDropped, deleted, deletesDropped          atomic.Uint64
	asked, found, askTimeouts, askFailed, askBusy atomic.Uint64
	collected, collectedBytes, collectFails       atomic.Uint64 // of names that nobody uses; looks that failed
	markFails                                     atomic.Uint64 // calls for markers that failed
}

func (p *Pool) newLane(number int, t Tier) (*lane, error) {
	if err := t.complete(); err != nil {
		return nil, err
	}
	for _, other := range p.lanes {
		if other.Name == t.Name {
			return nil, errors.New("tier " + t.Name + ": Name is used twice, allowed: once")
		}
	}
	l := &lane{Tier: t, p: p, number: number, trouble: make(chan struct{}, 1), questions: make(chan *question, questions)}
	if !t.Local {
		l.known = newKnown(knownEntries)
	}
	l.written = newKnown(knownEntries)
	l.asking.open = make(map[uint64]*question)
	l.puts.set = make(map[entryKey]*life)
	l.breaker.closed.Store(true)
	l.following = following{kick: make(chan struct{}, 1), heard: make(map[pool.Fingerprint]heard)}
	l.wake = sync.NewCond(&p.mu)
	l.fetches.lane, l.hints.lane = l, l
	return l, nil
}

// up says that the store may be asked.
func (l *lane) up() bool { return l.breaker.closed.Load() }

// work is the life of a worker.
func (l *lane) work(ctx context.Context) {
	for {
		t := l.next()
		switch {
		case len(t.fetch) > 0:
			l.fetch(ctx, t.fetch)
		case len(t.remove) > 0:
			l.remove(ctx, t.remove)
			l.wrote()
		case len(t.put) > 0:
			l.write(ctx, t.put)
			l.wrote()
		default:
			return
		}
	}
}

// task is what a worker does next: one of the three.
type task struct {
	fetch  []*promise
	remove []pool.Key
	put    []putItem
}

// next waits for work: fetches before deletes before puts. An empty task is the end.
func (l *lane) next() task {
	p := l.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for !p.mu.closed {
		if batch := p.takeFetchesLocked(l); len(batch) > 0 {
			return task{fetch: batch}
		}
		if l.up() && l.writers < max(l.Workers/2, 1) {
			if n := min(len(l.deletes), l.BatchItems); n > 0 {
				l.writers++
				keys := append([]pool.Key(nil), l.deletes[:n]...)
				l.deletes = append(l.deletes[:0], l.deletes[n:]...)
				return task{remove: keys}
			}
			if l.puts.len() > 0 && !p.now().Before(l.fullUntil) {
				l.writers++
				return task{put: l.puts.take(l)}
			}
		}
		l.wake.Wait()
	}
	return task{}
}

// wrote ends a task of writing.
func (l *lane) wrote() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.writers--
	l.wake.Signal()
}

// result counts what became of a call to the store, and opens the breaker if it was one failure too many.
func (l *lane) result(ctx context.Context, err error) {
	switch {
	case err == nil:
		l.breaker.worked()
		return
	case ctx.Err() != nil:
		return // the stack is closing
	case errors.Is(err, context.DeadlineExceeded):
		l.count.timeouts.Add(1)
	default:
		l.count.errors.Add(1)
	}
	if l.breaker.failed(&l.Tier, err) {
		l.p.o.Log(l.Name, "the store fails: nobody asks it until it works again", err)
		l.signal()
	}
}

func (l *lane) signal() {
	select {
	case l.trouble <- struct{}{}:
	default:
	}
}

// keep brings a store back that failed or was full.
func (l *lane) keep(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.trouble:
		}
		if !l.up() {
			l.p.abandon(l)
			l.mend(ctx)
		}
		l.waitRoom(ctx)
		l.wake.Broadcast()
	}
}

// mend tries the store again and again, with growing pauses, until it answers.
func (l *lane) mend(ctx context.Context) {
	for {
		_, _, _, pause, _ := l.breaker.state()
		if !pauseFor(ctx, pause) {
			return
		}
		if l.breaker.try(&l.Tier, func() error { return l.probe(ctx) }) == nil {
			l.p.o.Log(l.Name, "the store works again", nil)
			return
		}
	}
}

// probe asks for a key that is nowhere.
func (l *lane) probe(ctx context.Context) error {
	key := pool.Key{Hash: pool.Hash{Len: pool.MaxHashLen}}
	if _, err := rand.Read(key.Hash.Bytes[:]); err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, l.AskWithin)
	defer stop()
	return l.Store.Exists(ctx, []pool.Key{key}, make([]pool.Status, 1))
}

// waitRoom waits until a full store is offered something again.
func (l *lane) waitRoom(ctx context.Context) {
	l.p.mu.Lock()
	left := l.fullUntil.Sub(l.p.now())
	l.p.mu.Unlock()
	if left > 0 {
		pauseFor(ctx, left)
	}
}

// full notes that the store has no room: nothing is written for a while.
func (l *lane) full() {
	l.p.mu.Lock()
	l.fullUntil = l.p.now().Add(fullPause)
	l.p.mu.Unlock()
	l.signal()
}

// pauseFor waits; false: the context ended first.
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

// said bounds what is logged about a tier.
type said struct {
	mu   sync.Mutex
	last map[string]time.Time
}

// say logs at most once a second of each kind.
func (l *lane) say(what string, err error) {
	now := l.p.now()
	l.said.mu.Lock()
	if l.said.last == nil {
		l.said.last = make(map[string]time.Time)
	}
	quiet := now.Sub(l.said.last[what]) < logEvery
	if !quiet {
		l.said.last[what] = now
	}
	l.said.mu.Unlock()
	if !quiet {
		l.p.o.Log(l.Name, what, err)
	}
}
