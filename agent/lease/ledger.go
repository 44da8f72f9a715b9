// Package lease is the ledger of leases: which pinned blocks are promised to which session.
package lease

import (
	"sync"

	"github.com/kvagent/kvagent/pool"
)

// Ledger is the table of leases. A lease pins the blocks that a reserving look-up found. It belongs
// to the session that the look-up named, counts against the cap of that session's engine, and is
// identified by its serial number alone.
//
// One mutex guards it; pins are released by unpin outside of the mutex. A lease removed under the
// mutex belongs to the caller that removed it, so every pin is released exactly once.
type Ledger struct {
	unpin func([]pool.Ref)
	tiers pool.Tiers // nil: every ref is a pin in memory
	cap   int64      // bytes all engines together may lease, so that saves find room

	mu      sync.Mutex
	serial  uint64 // number of the newest lease; numbers start at 1
	passed  uint64 // no lease up to this number can be revoked
	open    map[uint64]*Lease
	bytes   int64    // of all open leases
	revoked uint64   // leases revoked, ever
	spare   []*Lease // unused, at most maxSpare, with their refs' memory
}

const maxSpare = 256

// Lease is one entry of the ledger, which owns its fields, except Refs while it is taken.
type Lease struct {
	number    uint64
	Refs      []pool.Ref
	bytes     int64
	owner     *Holder
	submitted bool // a LOAD has named it: it is not revoked
}

// Account counts an engine's leased bytes. The ledger owns it.
type Account struct {
	cap, used int64 // bytes
	count     int
}

// Holder is a session that may hold leases. The ledger owns it.
type Holder struct {
	acct   *Account
	closed bool
}

// New makes an empty ledger. All engines together may lease cap bytes; unpin releases pins. Without
// tiers below the pool's memory, tiers is nil.
func New(cap int64, unpin func([]pool.Ref), tiers pool.Tiers) *Ledger {
	return &Ledger{unpin: unpin, tiers: tiers, cap: cap, open: make(map[uint64]*Lease)}
}

// NewAccount makes the account of an engine, which may lease cap bytes.
func NewAccount(cap int64) *Account { return &Account{cap: cap} }

// NewHolder makes a holder that leases on an engine's account.
func NewHolder(a *Account) *Holder { return &Holder{acct: a} }

// Take returns a lease for the caller to fill and then to add or give back.
func (l *Ledger) Take() *Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.spare)
	if n == 0 {
		return &Lease{}
	}
	e := l.spare[n-1]
	l.spare = l.spare[:n-1]
	return e
}

// GiveBack takes a lease that is not in the ledger and releases its pins.
func (l *Ledger) GiveBack(e *Lease) {
	if len(e.Refs) > 0 {
		l.unpin(e.Refs)
	}
	*e = Lease{Refs: e.Refs[:0]}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.spare) < maxSpare {
		l.spare = append(l.spare, e)
	}
}

// Room returns the bytes that the holder may still lease; ok is false if its session has ended.
func (l *Ledger) Room(h *Holder) (bytes int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.roomLocked(h.acct), !h.closed
}

func (l *Ledger) roomLocked(a *Account) int64 {
	return max(min(a.cap-a.used, l.cap-l.bytes), 0)
}

// Add enters a taken and filled lease, and returns its serial number; 0: another look-up has
// reached a cap meanwhile, or the session has ended, and the lease remains the caller's.
func (l *Ledger) Add(h *Holder, e *Lease, bytes int64) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.closed || bytes > l.roomLocked(h.acct) {
		return 0
	}
	l.serial++
	e.number, e.bytes, e.owner = l.serial, bytes, h
	l.open[e.number] = e
	h.acct.used += bytes
	h.acct.count++
	l.bytes += bytes
	return e.number
}

// Settle calls then when none of the lease's promises is open any more. forget is that of
// pool.Tiers: nil if none is open, or the number is not open, or another engine's. l.mu is held
// during the call of the pool, so that the lease's refs stay valid.
func (l *Ledger) Settle(a *Account, number uint64, then func()) (forget func() bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var refs []pool.Ref
	if e := l.open[number]; e != nil && e.owner.acct == a {
		refs = e.Refs
	}
	return l.tiers.Settle(refs, then)
}

// Release ends leases of an account, or, if that is nil, of any, by their serial numbers. Numbers
// that are not open, or are another engine's, are ignored: a lease may have been revoked, or ended
// with its session. It returns how many it ended.
func (l *Ledger) Release(a *Account, numbers []uint64) (ended int) {
	for _, number := range numbers {
		l.mu.Lock()
		e := l.open[number]
		if is := e != nil && (a == nil || e.owner.acct == a); !is {
			l.mu.Unlock()
			continue
		}
		l.strikeLocked(e)
		l.mu.Unlock()
		l.GiveBack(e)
		ended++
	}
	return ended
}

// CloseHolder ends all leases of a session and refuses further ones.
func (l *Ledger) CloseHolder(h *Holder) {
	var ended []*Lease
	l.mu.Lock()
	h.closed = true
	for _, e := range l.open {
		if e.owner == h {
			l.strikeLocked(e)
			ended = append(ended, e)
		}
	}
	l.mu.Unlock()
	for _, e := range ended {
		l.GiveBack(e)
	}
}

// Totals returns the sums over all open leases.
func (l *Ledger) Totals() (count int, bytes int64, revoked uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open), l.bytes, l.revoked
}

// Usage returns the open leases of one engine.
func (l *Ledger) Usage(a *Account) (count int, bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return a.count, a.used
}

// Submit marks a lease as named by a LOAD of the same engine, so that it is not revoked from now
// on. It returns false for a number that is not open, or another engine's.
func (l *Ledger) Submit(a *Account, number uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.open[number]
	if e == nil || e.owner.acct != a {
		return false
	}
	e.submitted = true
	return true
}

// Revoke ends leases that no LOAD has named yet, oldest first, until need bytes are free or none is
// left. The pool calls it when a reservation finds no block to evict but pinned ones: it may evict
// them only after their lease has ended here. It reports whether it released anything.
func (l *Ledger) Revoke(need int64) bool {
	freed := int64(0)
	for more := true; more && freed < need; {
		var e *Lease
		if e, more = l.revokeNext(); e != nil {
			freed += e.bytes
			l.GiveBack(e)
		}
	}
	return freed > 0
}

// revokeStride bounds the numbers passed over under the lock.
const revokeStride = 1 << 10

// revokeNext strikes the oldest lease that no LOAD has named, or passes over some numbers; more is
// false if there are none left.
func (l *Ledger) revokeNext() (e *Lease, more bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for range revokeStride {
		if l.passed == l.serial {
			return nil, false
		}
		l.passed++
		if e = l.open[l.passed]; e != nil && !e.submitted {
			l.strikeLocked(e)
			l.revoked++
			return e, true
		}
	}
	return nil, true
}

// strikeLocked removes an open lease from the ledger. The caller gives it back after unlocking
// l.mu.
func (l *Ledger) strikeLocked(e *Lease) {
	delete(l.open, e.number)
	e.owner.acct.used -= e.bytes
	e.owner.acct.count--
	l.bytes -= e.bytes
}
