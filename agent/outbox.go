package agent

import "sync"

// outbox is the bounded queue of messages to one session. The writer takes them in order. Two kinds of callers
// put them in: completions and notices never wait, and an overflow means that the peer does not read any more;
// answers to the peer's own requests wait while the queue is more than half full, so that a peer that asks faster
// than it reads slows itself down, and completions always find room.
type outbox struct {
	limit int
	wake  chan struct{} // cap 1: there is something to write, or the box is closed
	room  chan struct{} // cap 1: less than half full again

	mu      sync.Mutex
	waiting []any
	count   int // waiting and taken, but not written
	closed  bool
}

func newOutbox(limit int) *outbox {
	return &outbox{limit: limit, wake: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// push adds a message without waiting; false: the queue is full or closed.
func (o *outbox) push(m any) bool { return o.add(m, o.limit) }

// answer adds a message to a queue that is at most half full, or waits for that until gone is closed. Only the
// session's reader calls it.
func (o *outbox) answer(m any, gone <-chan struct{}) bool {
	for !o.add(m, o.limit/2) {
		select {
		case <-o.room:
		case <-gone:
			return false
		}
	}
	return true
}

func (o *outbox) add(m any, limit int) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed || o.count >= limit {
		return false
	}
	o.waiting = append(o.waiting, m)
	o.count++
	signal(o.wake)
	return true
}

// take swaps what waits for an empty batch, and says whether the box is closed. Only the writer calls it.
func (o *outbox) take(empty []any) (batch []any, closed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	batch, o.waiting = o.waiting, empty[:0]
	return batch, o.closed
}

// written takes one message off the count. Only the writer calls it.
func (o *outbox) written() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.count--
	if o.count < o.limit/2 {
		signal(o.room)
	}
}

// close ends the queue: what waits may still be written, nothing is added.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	signal(o.wake)
}

func (o *outbox) depth() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.count
}

// signal sets a flag that is a channel of capacity 1.
func signal(flag chan struct{}) {
	select {
	case flag <- struct{}{}:
	default:
	}
}
