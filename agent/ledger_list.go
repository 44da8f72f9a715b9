package agent

// list is a doubly linked list of leases by prev and next.
type list struct{ head, tail *lease }

func (q *list) push(e *lease) {
	e.prev, e.next = q.tail, nil
	if q.tail == nil {
		q.head = e
	} else {
		q.tail.next = e
	}
	q.tail = e
}

func (q *list) remove(e *lease) {
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

func (h *holder) push(e *lease) {
	e.hprev, e.hnext = nil, h.first
	if h.first != nil {
		h.first.hprev = e
	}
	h.first = e
}

func (h *holder) remove(e *lease) {
	if e.hprev == nil {
		h.first = e.hnext
	} else {
		e.hprev.hnext = e.hnext
	}
	if e.hnext != nil {
		e.hnext.hprev = e.hprev
	}
	e.hprev, e.hnext = nil, nil
}
