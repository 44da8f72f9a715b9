package tier

import (
	"context"
	"time"
)

// No promise outlives its deadline. Its owner is the sweeper, which asks nobody: whatever a store,
// a breaker, a queue or staging does meanwhile, a promise that is still open PromiseWithin after it
// was made ends as one that did not come, and with it its share of the prefetch budget, its place
// in a queue and the calls that wait for it. Its pins are its holders' to take back, as ever. A
// worker that is still at it finds it ended, and gives its staging back when its store lets go of
// it.

// ages is the open promises in the order of their deadlines, which is the order they were made in.
// It is under Pool.mu.
type ages struct{ head, tail *promise }

func (a *ages) push(pr *promise) {
	pr.older, pr.younger = a.tail, nil
	if a.tail == nil {
		a.head = pr
	} else {
		a.tail.younger = pr
	}
	a.tail = pr
}

func (a *ages) remove(pr *promise) {
	if pr.older == nil {
		a.head = pr.younger
	} else {
		pr.older.younger = pr.younger
	}
	if pr.younger == nil {
		a.tail = pr.older
	} else {
		pr.younger.older = pr.older
	}
	pr.older, pr.younger = nil, nil
}

// sweep is the life of the sweeper. A promise made while it sleeps has a later deadline than the
// one it sleeps for.
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

// expire ends the promises whose deadline has come, and returns how long it is until the next one.
func (p *Pool) expire(now time.Time) time.Duration {
	var calls []func()
	p.mu.Lock()
	for p.mu.ages.head != nil && !p.mu.ages.head.deadline.After(now) {
		p.mu.expired++
		calls = p.settleLocked(p.mu.ages.head, failed, calls)
	}
	next := p.o.PromiseWithin
	if head := p.mu.ages.head; head != nil {
		next = head.deadline.Sub(now)
	}
	p.mu.Unlock()
	run(calls)
	return next
}

// settleAll ends every promise that is open: the stack is closing, and may have to wait for its
// stores.
func (p *Pool) settleAll() {
	var calls []func()
	p.mu.Lock()
	for p.mu.ages.head != nil {
		calls = p.settleLocked(p.mu.ages.head, failed, calls)
	}
	p.mu.Unlock()
	run(calls)
}

// step lets a test change the state of a tier at a point where a promise may meet it.
func (p *Pool) step() {
	if p.o.step != nil {
		p.o.step()
	}
}
