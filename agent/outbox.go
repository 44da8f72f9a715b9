package agent

import "sync"

// outbox is the bounded queue of messages to one session. The writer takes them in order.
// Completions and notices never wait; an overflow means that the peer does not read. Answers to the
// peer's own requests wait while the queue is more than half full, which slows down a peer that
// asks faster than it reads, and leaves room for completions.
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

// push adds a message without waiting. It returns false if the queue is full or closed.
func (o *outbox) push(m any) bool { return o.add(m, o.limit) }

// answer adds a message once the queue is at most half full, or gives up when ending is closed.
// Only the session's reader calls it.
func (o *outbox) answer(m any, ending <-chan struct{}) bool {
	for !o.add(m, o.limit/2) {
		select {
		case <-o.room:
		case <-ending:
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

// take exchanges the waiting messages for an empty batch, and reports whether the queue is closed.
// Only the writer calls it.
func (o *outbox) take(empty []any) (batch []any, closed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	batch, o.waiting = o.waiting, empty[:0]
	return batch, o.closed
}

// written subtracts one message from the count. Only the writer calls it.
func (o *outbox) written() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.count--
	if o.count < o.limit/2 {
		signal(o.room)
	}
}

// close ends the queue: waiting messages may still be written, further ones are refused.
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
