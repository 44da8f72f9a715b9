package transfer

import (
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer/pace"
)

// Lanes limits the copies that run at once on a device, and schedules them: loads before saves, but
// a save that has waited longer than Limits.SaveAge before both. While both kinds wait that long
// they alternate, so that neither starves. All workers of a device share one Lanes.
type Lanes struct {
	age time.Duration
	now func() time.Time

	mu struct {
		sync.Mutex
		free    int
		waiting [2][]*ticket // by Kind, oldest first
		aged    bool         // the last lane went to an aged save while loads waited
	}
}

// ticket is one wait for a lane and, once granted is closed, the right to copy.
type ticket struct {
	kind    Kind
	since   time.Time
	granted chan struct{}
	holds   bool // under Lanes.mu
}

// NewLanes makes n lanes, at least one. saveAge is how long loads may precede a waiting save; now
// is the clock, nil for time.Now.
func NewLanes(n int, saveAge time.Duration, now func() time.Time) *Lanes {
	if now == nil {
		now = time.Now
	}
	l := &Lanes{age: saveAge, now: now}
	l.mu.free = max(n, 1)
	return l
}

// enter requests a lane. The caller may wait for granted, and calls leave once in any case.
func (l *Lanes) enter(kind Kind) *ticket {
	t := &ticket{kind: kind, since: l.now(), granted: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.waiting[kind] = append(l.mu.waiting[kind], t)
	l.grantLocked()
	return t
}

// try gives a holder of a lane another free one. A save does not get the last one, which is
// reserved for a load. It takes no lane from a waiting ticket: while one waits, no lane is free.
func (l *Lanes) try(kind Kind) (*ticket, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.free == 0 || kind == Save && l.mu.free == 1 {
		return nil, false
	}
	l.mu.free--
	return &ticket{kind: kind, holds: true}, true
}

// leave returns the lane, or ends the wait for one.
func (l *Lanes) leave(t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.holds {
		t.holds = false
		l.mu.free++
		l.grantLocked()
		return
	}
	queue := l.mu.waiting[t.kind]
	for i := range queue {
		if queue[i] == t {
			l.mu.waiting[t.kind] = append(queue[:i:i], queue[i+1:]...)
			return
		}
	}
}

func (l *Lanes) grantLocked() {
	for l.mu.free > 0 {
		kind, ok := l.nextLocked()
		if !ok {
			return
		}
		t := l.mu.waiting[kind][0]
		l.mu.waiting[kind] = l.mu.waiting[kind][1:]
		l.mu.free--
		t.holds = true
		close(t.granted)
	}
}

// nextLocked returns the kind that is served next; ok is false if no ticket waits.
func (l *Lanes) nextLocked() (kind Kind, ok bool) {
	saves, loads := l.mu.waiting[Save], l.mu.waiting[Load]
	if len(loads) == 0 {
		l.mu.aged = false
		return Save, len(saves) > 0
	}
	old := len(saves) > 0 && l.now().Sub(saves[0].since) >= l.age
	l.mu.aged = old && !l.mu.aged
	if l.mu.aged {
		return Save, true
	}
	return Load, true
}

// awaited reports whether somebody waits for the worker's saves.
func (w *Worker) awaited() bool { return w.cfg.Awaited != nil && w.cfg.Awaited() }

// urgency returns whether a job's copies wait for the budget. A request waits for a load. A save
// that cannot be revoked keeps its blocks until it has ended, so it must end soon; and another
// engine may wait for a save.
func (th *thread) urgency(t *task) pace.Urgency {
	if th.kind == Load || t.job.Revoke == cudaipc.None || th.w.awaited() {
		return pace.Urgent
	}
	return pace.Save
}

// awaitPace waits until the budget has room for the job's next batch. While batches are in flight
// it does not wait: nextLane begins no further one then. It returns OK, or the status of the blocks
// that are left: a save that was revoked or cancelled meanwhile takes nothing from the budget.
func (th *thread) awaitPace(t *task) pool.Status {
	if len(th.begun) > 0 || th.w.cfg.Pacer.May() || th.urgency(t) == pace.Urgent {
		return pool.OK
	}
	th.enter(WaitingPace)
	turn := th.w.cfg.Pacer.Enter(pace.Save)
	defer turn.Leave()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if _, status := th.pollWanted(t, cudaipc.None); status != pool.OK {
			return status
		}
		wait := turn.Delay()
		if wait == 0 || th.urgency(t) == pace.Urgent {
			return pool.OK
		}
		timer.Reset(wait)
		if !th.wait(t, nil, timer.C) {
			return Cancelled
		}
	}
}
