package agent

import (
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// ledger is the book of leases. A lease pins what a reserving look-up found; it belongs to the session that the
// look-up named, counts against the cap of that session's engine, and is known by its serial number alone.
//
// One mutex, pure bookkeeping: pins are given back by unpin, outside of the mutex. What was taken out of the
// book under the mutex belongs to him who took it out, so that every pin is given back exactly once.
type ledger struct {
	unpin func([]pool.Ref)
	tiers pool.Tiers // nil: every ref is a pin in memory
	cap   int64      // bytes all engines together may lease, so that saves find room

	mu      sync.Mutex
	serial  uint64 // number of the newest lease; numbers start at 1
	open    map[uint64]*lease
	bytes   int64  // of all open leases
	revoked uint64 // leases revoked, ever
	idle    list   // open leases that no LOAD named yet, oldest first: what may be revoked
	free    *lease // leases ready for use, with their refs' memory
	nfree   int
}

// maxFreeLeases is the number of unused leases kept for their memory.
const maxFreeLeases = 256

// lease is one entry of the book. Its fields are the ledger's, refs and bytes excepted while it is taken.
type lease struct {
	number     uint64
	refs       []pool.Ref
	bytes      int64
	owner      *holder
	submitted  bool
	prev, next *lease // in ledger.idle, or next in ledger.free
	hprev      *lease // in holder.first
	hnext      *lease
}

// account is what an engine may hold. It is the ledger's.
type account struct {
	cap, used int64 // bytes
	count     int
}

// holder is a session that may hold leases. It is the ledger's.
type holder struct {
	acct   *account
	first  *lease
	closed bool
}

func newLedger(cap int64, unpin func([]pool.Ref)) *ledger {
	return &ledger{unpin: unpin, cap: cap, open: make(map[uint64]*lease)}
}

// take gives a lease to be filled by the caller, who then adds it or gives it back.
func (l *ledger) take() *lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.free
	if e == nil {
		return &lease{}
	}
	l.free, l.nfree = e.next, l.nfree-1
	e.next = nil
	return e
}

// giveBack returns a lease that is not, or no longer, in the book: its pins are given back here.
func (l *ledger) giveBack(e *lease) {
	if len(e.refs) > 0 {
		l.unpin(e.refs)
	}
	*e = lease{refs: e.refs[:0]}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.nfree < maxFreeLeases {
		e.next = l.free
		l.free, l.nfree = e, l.nfree+1
	}
}

// room is what the holder may still lease, in bytes; ok is false if its session has ended.
func (l *ledger) room(h *holder) (bytes int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.roomLocked(h.acct), !h.closed
}

func (l *ledger) roomLocked(a *account) int64 {
	return max(min(a.cap-a.used, l.cap-l.bytes), 0)
}

// addResult says what became of an add.
type addResult uint8

const (
	added    addResult = iota
	overCap            // another look-up was quicker: a cap is reached
	noHolder           // the session has ended meanwhile
)

// add enters a taken and filled lease under the next serial number. If it is not added it stays the caller's.
func (l *ledger) add(h *holder, e *lease, bytes int64) (uint64, addResult) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.closed {
		return 0, noHolder
	}
	if bytes > l.roomLocked(h.acct) {
		return 0, overCap
	}
	l.serial++
	e.number, e.bytes, e.owner = l.serial, bytes, h
	l.open[e.number] = e
	l.idle.push(e)
	h.push(e)
	h.acct.used += bytes
	h.acct.count++
	l.bytes += bytes
	return e.number, added
}

// submit marks a lease as named by a LOAD of the same engine: from now on it is not revoked. It says false for a
// number that is not open, or another engine's.
func (l *ledger) submit(a *account, number uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.open[number]
	if e == nil || e.owner.acct != a {
		return false
	}
	if !e.submitted {
		e.submitted = true
		l.idle.remove(e)
	}
	return true
}

// settle calls then when nothing that the lease promises is open any more; at once, and maybe before it returns, if the number is not open, or is another
// engine's. forget is as pool.Tiers says. l.mu is held while the pool is asked, so that the lease's refs stay.
func (l *ledger) settle(a *account, number uint64, then func()) (forget func() bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var refs []pool.Ref
	if e := l.open[number]; e != nil && e.owner.acct == a {
		refs = e.refs
	}
	return l.tiers.Settle(refs, then)
}

// release ends leases by their serial numbers. Numbers that are not open, or are another engine's, are passed
// over: a lease may have been revoked, or ended with its session. It says how many it ended.
func (l *ledger) release(a *account, numbers []uint64) int {
	n := 0
	for _, number := range numbers {
		l.mu.Lock()
		e := l.open[number]
		if e != nil && e.owner.acct == a {
			l.strikeLocked(e)
		} else {
			e = nil
		}
		l.mu.Unlock()
		if e != nil {
			l.giveBack(e)
			n++
		}
	}
	return n
}

// takeBack ends a lease whose number nobody has got.
func (l *ledger) takeBack(number uint64) {
	l.mu.Lock()
	e := l.open[number]
	if e != nil {
		l.strikeLocked(e)
	}
	l.mu.Unlock()
	if e != nil {
		l.giveBack(e)
	}
}

// closeHolder ends all leases of a session, and sees to it that it gets no more.
func (l *ledger) closeHolder(h *holder) {
	for {
		l.mu.Lock()
		h.closed = true
		e := h.first
		if e != nil {
			l.strikeLocked(e)
		}
		l.mu.Unlock()
		if e == nil {
			return
		}
		l.giveBack(e)
	}
}

// revoke ends leases no LOAD has named yet, the oldest first, until need bytes are free or none is left. It is
// what the pool calls under pressure, and says whether it gave anything back.
func (l *ledger) revoke(need int64) bool {
	freed := int64(0)
	for freed < need {
		l.mu.Lock()
		e := l.idle.head
		if e != nil {
			l.strikeLocked(e)
			l.revoked++
		}
		l.mu.Unlock()
		if e == nil {
			break
		}
		freed += e.bytes
		l.giveBack(e)
	}
	return freed > 0
}

// strikeLocked takes an open lease out of the book. The caller gives it back once l.mu is free.
func (l *ledger) strikeLocked(e *lease) {
	delete(l.open, e.number)
	if !e.submitted {
		l.idle.remove(e)
	}
	e.owner.remove(e)
	e.owner.acct.used -= e.bytes
	e.owner.acct.count--
	l.bytes -= e.bytes
}

// totals of the book.
func (l *ledger) totals() (count int, bytes int64, revoked uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open), l.bytes, l.revoked
}

// usage of one engine.
func (l *ledger) usage(a *account) (count int, bytes, cap int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return a.count, a.used, a.cap
}
