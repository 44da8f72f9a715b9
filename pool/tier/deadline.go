package tier

import (
	"context"
	"time"
)

// Every promise has a deadline, PromiseWithin after it was made. The sweeper ends those still open
// then, whatever stores, breakers, queues and staging do: they leave the prefetch budget and their
// queue, and their waiters are called. Pins stay until their holders release them. A worker that is
// still fetching finds the promise ended, and returns its staging when the store is done with it.

// deadlineList holds the open promises in the order of their deadlines, which is the order they
// were made in. Pool.mu guards it.
type deadlineList struct{ head, tail *promise }

func (a *deadlineList) push(pr *promise) {
	pr.older, pr.younger = a.tail, nil
	if a.tail == nil {
		a.head = pr
	} else {
		a.tail.younger = pr
	}
	a.tail = pr
}

func (a *deadlineList) remove(pr *promise) {
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
	for p.mu.deadlines.head != nil && !p.mu.deadlines.head.deadline.After(now) {
		p.mu.expired++
		calls = p.settleLocked(p.mu.deadlines.head, failed, calls)
	}
	next := p.o.PromiseWithin
	if head := p.mu.deadlines.head; head != nil {
		next = head.deadline.Sub(now)
	}
	p.mu.Unlock()
	run(calls)
	return next
}

// settleAll ends every open promise when the pool closes, without waiting for stores.
func (p *Pool) settleAll() {
	var calls []func()
	p.mu.Lock()
	for p.mu.deadlines.head != nil {
		calls = p.settleLocked(p.mu.deadlines.head, failed, calls)
	}
	p.mu.Unlock()
	run(calls)
}

// callTestHook lets a test change a tier's state at the points where a promise depends on it. No
// lock is held there.
func (p *Pool) callTestHook() {
	if p.o.testHook != nil {
		p.o.testHook()
	}
}
