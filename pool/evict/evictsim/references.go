package evictsim

import (
	"container/heap"
	"container/list"
	"math"
)

// Optimum returns the result of the policy that knows the future: it evicts the block that is used
// again last, of blocks of one request the one farther from its start (Belady).
func Optimum(s *Stream, capacity int) Result {
	next := nextUses(s)
	stored := make([]bool, s.Blocks)
	due := make([]uint64, s.Blocks) // of a stored block: its next use, and its position
	var h latest
	var r Result
	count := 0
	for i := range s.Requests {
		blocks := s.Requests[i].Blocks
		hitting := true
		for j, b := range blocks {
			if hitting = hitting && stored[b]; hitting {
				r.Hits++
			}
			if !stored[b] {
				stored[b] = true
				count++
			}
			due[b] = uint64(next[i][j])<<16 | uint64(min(j, math.MaxUint16))
			heap.Push(&h, use{due[b], b})
		}
		r.Blocks += len(blocks)
		for count > capacity {
			u := heap.Pop(&h).(use)
			if stored[u.block] && due[u.block] == u.due {
				stored[u.block] = false
				count--
			}
		}
	}
	return r
}

// nextUses returns, per request and block, the number of the next request with the block.
func nextUses(s *Stream) [][]uint32 {
	next := make([][]uint32, len(s.Requests))
	last := make([]uint32, s.Blocks)
	for b := range last {
		last[b] = math.MaxUint32
	}
	for i := len(s.Requests) - 1; i >= 0; i-- {
		blocks := s.Requests[i].Blocks
		next[i] = make([]uint32, len(blocks))
		for j, b := range blocks {
			next[i][j] = last[b]
			last[b] = uint32(i)
		}
	}
	return next
}

type use struct {
	due   uint64
	block uint32
}

// latest is a heap with the latest use on top.
type latest []use

func (h latest) Len() int           { return len(h) }
func (h latest) Less(i, j int) bool { return h[i].due > h[j].due }
func (h latest) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *latest) Push(x any)        { *h = append(*h, x.(use)) }
func (h *latest) Pop() any {
	old := *h
	x := old[len(old)-1]
	*h = old[:len(old)-1]
	return x
}

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
