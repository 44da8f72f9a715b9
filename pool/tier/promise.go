package tier

import (
	"time"

	"github.com/kvagent/kvagent/pool"
)

// promiseBit tells a promise from a pin of memory, whose refs leave it clear.
const promiseBit = pool.Ref(1) << 63

// promise is an entry that is being brought to memory. All of it but what is set at its making is under Pool.mu.
type promise struct {
	id     uint64
	key    entryKey
	parent pool.Hash
	sp     *space
	life   *life
	group  *group
	since  time.Time

	deadline       time.Time // by the machine's monotonic clock: when the sweeper ends it
	older, younger *promise  // in Pool.mu.ages, while it is open

	state   promiseState
	pins    int   // refs that are out
	hint    bool  // it comes also if nobody holds it
	lanes   uint8 // tiers that are still to be tried, a bit each
	waiters []*waiter
	held    []pool.Slot // landed: the pin in memory that the refs stand for

	line       *line
	prev, next *promise
}

type promiseState uint8

const (
	queued promiseState = iota
	running
	landed
	failed
)

func (pr *promise) open() bool    { return pr.state == queued || pr.state == running }
func (pr *promise) wanted() bool  { return pr.pins > 0 || pr.hint }
func (pr *promise) ref() pool.Ref { return promiseBit | pool.Ref(pr.id) }

// wish is an entry that somebody wants in memory.
type wish struct {
	key    entryKey
	parent pool.Hash
	sp     *space
	life   *life
	group  *group
	lanes  uint8
}

// promiseLocked takes a pin of what is under way already, or gives a new promise; false: the byte
// budget is used up, or no tier that has the entry is asked any more.
func (p *Pool) promiseLocked(w *wish) (pool.Ref, bool) {
	pr := p.mu.open[w.key]
	if pr == nil || pr.life != w.life {
		if p.mu.closed || p.mu.bytes > 0 && p.mu.bytes+w.group.memory > p.o.PrefetchBytes {
			return 0, false
		}
		pr = &promise{
			id: p.mu.lastID + 1, key: w.key, parent: w.parent, sp: w.sp, life: w.life, group: w.group, lanes: w.lanes,
			since: p.now(), deadline: time.Now().Add(p.o.PromiseWithin),
		}
		if !p.sendLocked(pr) {
			return 0, false // a breaker opened since the tiers were looked at
		}
		p.mu.lastID++
		p.mu.promised++
		p.mu.open[w.key] = pr
		p.mu.byID[pr.id] = pr
		p.mu.bytes += pr.group.memory
		p.mu.ages.push(pr)
	}
	pr.pins++
	if pr.state == queued && pr.pins == 1 && pr.hint {
		pr.line.lane.promoteLocked(pr) // somebody waits for it now
	}
	return pr.ref(), true
}

// promoteLocked moves a promise that waits at a tier behind those that are held: whether the tier
// is asked has been decided.
func (l *lane) promoteLocked(pr *promise) {
	pr.leave()
	l.fetches.push(pr)
	l.wake.Signal()
}

// sendLocked queues a promise at the nearest tier that is still to be tried. False: there is none,
// and the caller settles it.
func (p *Pool) sendLocked(pr *promise) bool {
	pr.leave()
	for _, l := range p.lanes {
		if pr.lanes&(1<<l.number) == 0 || !l.up() {
			continue
		}
		pr.state = queued
		if pr.hint && pr.pins == 0 {
			l.hints.push(pr)
		} else {
			l.fetches.push(pr)
		}
		l.wake.Signal()
		return true
	}
	return false
}

// settleLocked ends a promise that is open, and appends whom to call when mu is free. One that has
// ended stays as it ended.
func (p *Pool) settleLocked(pr *promise, state promiseState, calls []func()) []func() {
	if !pr.open() {
		return calls
	}
	pr.leave()
	p.mu.ages.remove(pr)
	pr.state = state
	p.mu.bytes -= pr.group.memory
	if p.mu.open[pr.key] == pr {
		delete(p.mu.open, pr.key)
	}
	if state == landed {
		p.mu.landed++
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

// unpinLocked takes one pin back. What it held in memory is appended to slots, to be released when mu is free.
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
	} // one that is running ends by itself, and is taken up again if it is wanted until then
	return calls, slots
}

// giveBack takes pins of promises back; with keep they come nevertheless, as far as they are still open.
func (p *Pool) giveBack(refs []pool.Ref, keep bool) {
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
		p.memory.Release(slots, make([]pool.Status, len(slots)))
	}
}

func run(calls []func()) {
	for _, then := range calls {
		then()
	}
}

// abandon takes everything out of a tier's queues that waits to be fetched: it goes to the next tier that has it, or does not come.
func (p *Pool) abandon(l *lane) {
	var calls []func()
	p.mu.Lock()
	for _, q := range []*line{&l.fetches, &l.hints} {
		for q.head != nil {
			calls = p.elsewhereLocked(q.head, l, calls)
		}
	}
	p.mu.Unlock()
	run(calls)
}

// elsewhereLocked sends a promise that a tier did not keep to the next one, or ends it.
func (p *Pool) elsewhereLocked(pr *promise, l *lane, calls []func()) []func() {
	if !pr.open() {
		return calls
	}
	pr.lanes &^= 1 << l.number
	if !p.mu.closed && pr.wanted() && p.sendLocked(pr) {
		return calls
	}
	return p.settleLocked(pr, failed, calls)
}

// cancelSpace ends the promises of a space that wait; those under way find their epoch over.
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
