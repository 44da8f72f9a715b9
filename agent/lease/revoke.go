package lease

// Submit marks a lease as named by a LOAD of the same engine, so that it is not revoked from now
// on. It returns false for a number that is not open, or another engine's.
func (l *Ledger) Submit(a *Account, number uint64) bool {
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

// Revoke ends leases that no LOAD has named yet, oldest first, until need bytes are free or none is
// left. The pool calls it when a reservation finds no block to evict but pinned ones: it may evict
// them only after their lease has ended here. It reports whether it released anything.
func (l *Ledger) Revoke(need int64) bool {
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
		l.GiveBack(e)
	}
	return freed > 0
}

// strikeLocked removes an open lease from the ledger. The caller gives it back after unlocking
// l.mu.
func (l *Ledger) strikeLocked(e *Lease) {
	delete(l.open, e.number)
	if !e.submitted {
		l.idle.remove(e)
	}
	e.owner.remove(e)
	e.owner.acct.used -= e.bytes
	e.owner.acct.count--
	l.bytes -= e.bytes
}

// list is a doubly linked list of leases by prev and next.
type list struct{ head, tail *Lease }

func (q *list) push(e *Lease) {
	e.prev, e.next = q.tail, nil
	if q.tail == nil {
		q.head = e
	} else {
		q.tail.next = e
	}
	q.tail = e
}

func (q *list) remove(e *Lease) {
	if e.prev == nil {
		q.head = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		q.tail = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.prev, e.next = nil, nil
}
