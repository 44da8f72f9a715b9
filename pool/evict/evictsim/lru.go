package evictsim

import "container/list"

// LRU is the hits of exact LRU: after each request its blocks are the most recent, the first most of all.
func LRU(s *Stream, capacity int) Result {
	recent, place := list.New(), make([]*list.Element, s.Blocks)
	var r Result
	for i := range s.Requests {
		blocks := s.Requests[i].Blocks
		for _, b := range blocks {
			if place[b] == nil {
				break
			}
			r.Hits++
		}
		r.Blocks += len(blocks)
		for j := len(blocks) - 1; j >= 0; j-- {
			if at := place[blocks[j]]; at != nil {
				recent.MoveToFront(at)
			} else {
				place[blocks[j]] = recent.PushFront(blocks[j])
			}
		}
		for recent.Len() > capacity {
			place[recent.Remove(recent.Back()).(uint32)] = nil
		}
	}
	return r
}
