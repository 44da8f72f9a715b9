//go:build cuda

package cuda

import "sync"

// queue passes values on without waiting for the receiver. Each use states its bound.
type queue[T any] struct {
	mu struct {
		sync.Mutex
		list   []T
		closed bool
	}
	some sync.Cond // something is in the list, or it is closed
}

func newQueue[T any]() *queue[T] {
	q := &queue[T]{}
	q.some.L = &q.mu
	return q
}

func (q *queue[T]) put(v T) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.list = append(q.mu.list, v)
	q.some.Signal()
}

// take returns the oldest; with wait it waits for one. ok is false if there is none, or none any
// more.
func (q *queue[T]) take(wait bool) (v T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for wait && len(q.mu.list) == 0 && !q.mu.closed {
		q.some.Wait()
	}
	if len(q.mu.list) == 0 {
		return v, false
	}
	v = q.mu.list[0]
	q.mu.list = q.mu.list[1:]
	return v, true
}

// close wakes waiting receivers; values in the queue can still be taken.
func (q *queue[T]) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.closed = true
	q.some.Broadcast()
}
