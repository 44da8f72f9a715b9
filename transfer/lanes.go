package transfer

import (
	"sync"
	"time"
)

// Lanes is the number of copies that run at once on a device, and who goes next: loads before saves, but a
// save that waited longer than Limits.SaveAge before both. While both kinds wait that long, they take turns, so
// that neither starves. All workers of a device share one.
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

// NewLanes makes n lanes, at least one. saveAge is how long loads may go before a save; now is the clock, nil
// for time.Now.
func NewLanes(n int, saveAge time.Duration, now func() time.Time) *Lanes {
	if now == nil {
		now = time.Now
	}
	l := &Lanes{age: saveAge, now: now}
	l.mu.free = max(n, 1)
	return l
}

// enter asks for a lane. The caller waits for granted, or not, and calls leave once in any case.
func (l *Lanes) enter(kind Kind) *ticket {
	t := &ticket{kind: kind, since: l.now(), granted: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.waiting[kind] = append(l.mu.waiting[kind], t)
	l.grantLocked()
	return t
}

// try gives whoever has a lane one more that is free now: a save not the last, for a load may come. Nobody is kept from one that
// waits: where somebody does, none is free.
func (l *Lanes) try(kind Kind) (*ticket, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.free == 0 || kind == Save && l.mu.free == 1 {
		return nil, false
	}
	l.mu.free--
	return &ticket{kind: kind, holds: true}, true
}

// leave gives the lane back, or the wait for one up.
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

// nextLocked says which kind goes next; ok is false if nobody waits.
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
