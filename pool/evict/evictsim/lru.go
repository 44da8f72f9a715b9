package evictsim

import "container/list"

// LRU returns the result of exact LRU.
func LRU(s *Stream, capacity int) Result {
	l := newExactLRU(s, capacity)
	for i := range s.Requests {
		l.request(&s.Requests[i])
	}
	return l.result
}

// exactLRU makes the blocks of a request the most recent, the first most of all.
type exactLRU struct {
	capacity int
	recent   *list.List      // blocks
	place    []*list.Element // by block
	result   Result
}

func newExactLRU(s *Stream, capacity int) *exactLRU {
	return &exactLRU{capacity: capacity, recent: list.New(), place: make([]*list.Element, s.Blocks)}
}

func (l *exactLRU) request(r *Request) {
	for _, b := range r.Blocks {
		if l.place[b] == nil {
			break
		}
		l.result.Hits++
	}
	l.result.Blocks += len(r.Blocks)
	for j := len(r.Blocks) - 1; j >= 0; j-- {
		b := r.Blocks[j]
		if at := l.place[b]; at != nil {
			l.recent.MoveToFront(at)
		} else {
			l.place[b] = l.recent.PushFront(b)
		}
	}
	for l.recent.Len() > l.capacity {
		l.place[l.recent.Remove(l.recent.Back()).(uint32)] = nil
	}
}
