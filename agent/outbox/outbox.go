// Package outbox is the bounded queue of messages to one session.
package outbox

import "sync"

// Queue is the bounded queue of messages to one session. The writer takes them in order.
// Completions and notices never wait; an overflow means that the peer does not read. Answers to the
// peer's own requests wait while the queue is more than half full, which slows down a peer that
// asks faster than it reads, and leaves room for completions.
type Queue struct {
	limit int
	wake  chan struct{} // cap 1: there is something to write, or the box is closed
	room  chan struct{} // cap 1: less than half full again

	mu      sync.Mutex
	waiting []any
	count   int // waiting and taken, but not written
	closed  bool
}

// New returns a queue of at most limit messages.
func New(limit int) *Queue {
	return &Queue{limit: limit, wake: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// Push adds a message without waiting. It returns false if the queue is full or closed.
func (o *Queue) Push(m any) bool { return o.add(m, o.limit) }

// Answer adds a message once the queue is at most half full, or gives up when ending is closed.
// Only the session's reader calls it.
func (o *Queue) Answer(m any, ending <-chan struct{}) bool {
	for !o.add(m, o.limit/2) {
		select {
		case <-o.room:
		case <-ending:
			return false
		}
	}
	return true
}

func (o *Queue) add(m any, limit int) bool {
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

// Take exchanges the waiting messages for an empty batch, and reports whether the queue is closed.
// Only the writer calls it.
func (o *Queue) Take(empty []any) (batch []any, closed bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	batch, o.waiting = o.waiting, empty[:0]
	return batch, o.closed
}

// Written subtracts one message from the count. Only the writer calls it.
func (o *Queue) Written() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.count--
	if o.count < o.limit/2 {
		signal(o.room)
	}
}

// Close ends the queue: waiting messages may still be written, further ones are refused.
func (o *Queue) Close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	signal(o.wake)
}

// Limit returns the most messages that may wait.
func (o *Queue) Limit() int { return o.limit }

// Wake returns a channel that says that there is something to write, or that the queue is closed.
func (o *Queue) Wake() <-chan struct{} { return o.wake }

// Depth returns the number of messages that are not written.
func (o *Queue) Depth() int {
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
