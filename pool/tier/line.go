package tier

// line is a queue of promises, the oldest first.
type line struct {
	lane       *lane
	head, tail *promise
	n          int
}

func (q *line) push(pr *promise) {
	pr.line, pr.prev, pr.next = q, q.tail, nil
	if q.tail == nil {
		q.head = pr
	} else {
		q.tail.next = pr
	}
	q.tail = pr
	q.n++
}

func (pr *promise) leave() {
	q := pr.line
	if q == nil {
		return
	}
	if pr.prev == nil {
		q.head = pr.next
	} else {
		pr.prev.next = pr.next
	}
	if pr.next == nil {
		q.tail = pr.prev
	} else {
		pr.next.prev = pr.prev
	}
	pr.line, pr.prev, pr.next = nil, nil, nil
	q.n--
}
