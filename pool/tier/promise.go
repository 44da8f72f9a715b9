package tier

import (
	"container/list"
	"context"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// promiseBit marks a promise; refs of memory have it clear.
const promiseBit = pool.Ref(1) << 63 // memory leaves it clear

// promise is an entry that is being brought to memory. Pool.mu guards the fields that change.
type promise struct {
	origin
	id       uint64
	group    *group
	since    time.Time
	deadline time.Time     // of the machine's monotonic clock: when the sweeper ends it
	aged     *list.Element // in Pool.mu.deadlines while it is open

	state   promiseState
	pins    int   // refs of it
	hint    bool  // it is fetched even without pins
	first   uint8 // the nearest tier that was believed to have it
	levels  uint8 // tiers still to be tried, as bits
	waiters []*waiter
	held    []pool.Slot // the pin in memory that the refs stand for, once installed

	level *level        // where it is queued
	place *list.Element // in level.fetches; nil: it is not queued
}

type promiseState uint8

const (
	queued promiseState = iota
	running
	installed
	failed
)

func (pr *promise) open() bool    { return pr.state == queued || pr.state == running }
func (pr *promise) wanted() bool  { return pr.pins > 0 || pr.hint }
func (pr *promise) ref() pool.Ref { return promiseBit | pool.Ref(pr.id) }

// promiseLocked pins the open promise of an entry, or else a new one. It returns false if memory
// has the entry by now, the prefetch budget is used up or no tier that has the entry is up.
func (p *Pool) promiseLocked(made *promise) (pool.Ref, bool) {
	pr := p.mu.open[made.key]
	if pr == nil || pr.era != made.era {
		if p.mu.closed || p.mu.bytes > 0 && p.mu.bytes+made.group.memory > p.o.PrefetchBytes || p.has(&made.origin) {
			return 0, false
		}
		pr = made
		pr.id, pr.since, pr.deadline = p.mu.lastID+1, p.now(), time.Now().Add(p.o.PromiseWithin)
		if !p.sendLocked(pr) {
			return 0, false // a breaker opened since the look-up
		}
		p.mu.lastID++
		p.mu.promised++
		p.mu.open[pr.key] = pr
		p.mu.byID[pr.id] = pr
		p.mu.bytes += pr.group.memory
		pr.aged = p.mu.deadlines.PushBack(pr)
	}
	pr.pins++
	return pr.ref(), true
}

func (pr *promise) dequeue() {
	if pr.place != nil {
		pr.level.fetches.Remove(pr.place)
		pr.place = nil
	}
}

// sendLocked queues a promise at the nearest tier still to be tried. It returns false if there is
// none; the caller then settles the promise.
func (p *Pool) sendLocked(pr *promise) bool {
	pr.dequeue()
	for _, l := range p.levels {
		if pr.levels&(1<<l.number) == 0 || !l.up() {
			continue
		}
		pr.state, pr.level, pr.place = queued, l, l.fetches.PushBack(pr)
		l.wake.Signal()
		return true
	}
	return false
}

// settleLocked ends a promise unless it has ended, and appends the waiters to call without mu.
func (p *Pool) settleLocked(pr *promise, state promiseState, calls []func()) []func() {
	if !pr.open() {
		return calls
	}
	pr.dequeue()
	p.mu.deadlines.Remove(pr.aged)
	pr.state = state
	p.mu.bytes -= pr.group.memory
	if p.mu.open[pr.key] == pr {
		delete(p.mu.open, pr.key)
	}
	if state == installed {
		p.mu.installed++
	} else {
		p.mu.failed++
	}
	for _, w := range pr.waiters {
		if w.left--; w.left == 0 && !w.over {
			w.over = true
			calls = append(calls, w.then)
		}
	}
	pr.waiters = nil
	if pr.pins == 0 {
		delete(p.mu.byID, pr.id)
	}
	return calls
}

// unpinLocked releases one pin. It appends what to call and which slots to release without mu.
func (p *Pool) unpinLocked(ref pool.Ref, calls []func(), slots []pool.Slot) ([]func(), []pool.Slot) {
	pr := p.mu.byID[uint64(ref&^promiseBit)]
	if pr == nil || pr.pins == 0 {
		return calls, slots
	}
	pr.pins--
	switch {
	case pr.pins > 0:
	case !pr.open():
		slots = append(slots, pr.held...)
		pr.held = nil
		delete(p.mu.byID, pr.id)
	case pr.hint:
	case pr.state == queued:
		p.mu.dropped++
		calls = p.settleLocked(pr, failed, calls)
	} // a running one ends by itself; it can be pinned again until then
	return calls, slots
}

// unpinPromises releases the pins of promises among refs. With keep, open ones become hints.
func (p *Pool) unpinPromises(refs []pool.Ref, keep bool) {
	var calls []func()
	var slots []pool.Slot
	p.mu.Lock()
	for _, ref := range refs {
		if ref&promiseBit == 0 {
			continue
		}
		if pr := p.mu.byID[uint64(ref&^promiseBit)]; keep && pr != nil && pr.open() {
			pr.hint = true
		}
		calls, slots = p.unpinLocked(ref, calls, slots)
	}
	p.mu.Unlock()
	p.release(slots)
	run(calls)
}

func (p *Pool) release(slots []pool.Slot) {
	if len(slots) > 0 {
		p.Memory.Release(slots, make([]pool.Status, len(slots)))
	}
}

func run(calls []func()) {
	for _, then := range calls {
		then()
	}
}

// requeueAll moves what waits to be fetched from a tier to the next one that has it, or ends it.
func (p *Pool) requeueAll(l *level) {
	var calls []func()
	p.mu.Lock()
	for l.fetches.Len() > 0 {
		calls = p.tryNextLocked(l.fetches.Front().Value.(*promise), l, calls)
	}
	p.mu.Unlock()
	run(calls)
}

// tryNextLocked sends a promise that a tier could not fetch to the next one, or ends it.
func (p *Pool) tryNextLocked(pr *promise, l *level, calls []func()) []func() {
	if !pr.open() {
		return calls
	}
	pr.levels &^= 1 << l.number
	if !p.mu.closed && pr.wanted() && p.sendLocked(pr) {
		return calls
	}
	return p.settleLocked(pr, failed, calls)
}

// cancelSpace ends the queued promises of a space. Running ones find that their epoch is over.
func (p *Pool) cancelSpace(id pool.SpaceID) {
	var calls []func()
	p.mu.Lock()
	for _, pr := range p.mu.open {
		if pr.key.space == id && pr.state == queued {
			calls = p.settleLocked(pr, failed, calls)
		}
	}
	p.mu.Unlock()
	run(calls)
}

// Every promise has a deadline, PromiseWithin after it was made. The sweeper ends those still open
// then, whatever stores, breakers, queues and staging do: they leave the prefetch budget and their
// queue, and their waiters are called. Pins stay until their holders release them. A worker that is
// still fetching finds the promise ended, and returns its staging when the store is done with it.

// sweep runs the sweeper until ctx ends. A promise made while it sleeps has a later deadline than
// the one it sleeps for.
func (p *Pool) sweep(ctx context.Context) {
	timer := time.NewTimer(p.o.PromiseWithin)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
			timer.Reset(p.expire(time.Now()))
		}
	}
}

// expire ends the promises whose deadline has passed, and returns the time until the next one.
func (p *Pool) expire(now time.Time) time.Duration {
	var calls []func()
	p.mu.Lock()
	next := p.o.PromiseWithin
	for p.mu.deadlines.Len() > 0 {
		oldest := p.mu.deadlines.Front().Value.(*promise)
		if oldest.deadline.After(now) {
			next = oldest.deadline.Sub(now)
			break
		}
		p.mu.expired++
		calls = p.settleLocked(oldest, failed, calls)
	}
	p.mu.Unlock()
	run(calls)
	return next
}

// settleAll ends every open promise when the pool closes, without waiting for stores.
func (p *Pool) settleAll() {
	var calls []func()
	p.mu.Lock()
	for p.mu.deadlines.Len() > 0 {
		calls = p.settleLocked(p.mu.deadlines.Front().Value.(*promise), failed, calls)
	}
	p.mu.Unlock()
	run(calls)
}

// callTestHook lets a test change a tier's state where a promise depends on it, without a lock.
func (p *Pool) callTestHook() {
	if p.o.testHook != nil {
		p.o.testHook()
	}
}
