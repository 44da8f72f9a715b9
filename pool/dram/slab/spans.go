package slab

import "slices"

// spans allocates ranges of the cell table, first fit. There are at most as many as slabs.
type spans struct {
	free []span // by first, no two adjacent
	top  uint32 // cells from here on are free
	high uint32 // cells from here on have never been used
}

type span struct{ first, n uint32 }

func (s *spans) take(n uint32) (first uint32, ok bool) {
	for i := range s.free {
		f := &s.free[i]
		if f.n < n {
			continue
		}
		first = f.first
		f.first, f.n = f.first+n, f.n-n
		if f.n == 0 {
			s.free = slices.Delete(s.free, i, i+1)
		}
		return first, true
	}
	if s.top > 1<<32-1-n {
		return 0, false
	}
	first = s.top
	s.top += n
	s.high = max(s.high, s.top)
	return first, true
}

func (s *spans) give(first, n uint32) {
	i := 0
	for i < len(s.free) && s.free[i].first < first {
		i++
	}
	s.free = slices.Insert(s.free, i, span{first, n})
	if i+1 < len(s.free) && first+n == s.free[i+1].first {
		s.free[i].n += s.free[i+1].n
		s.free = slices.Delete(s.free, i+1, i+2)
	}
	if i > 0 && s.free[i-1].first+s.free[i-1].n == first {
		s.free[i-1].n += s.free[i].n
		s.free = slices.Delete(s.free, i, i+1)
		i--
	}
	if f := s.free[i]; f.first+f.n == s.top {
		s.top = f.first
		s.free = slices.Delete(s.free, i, i+1)
	}
}

// mark takes a range that an earlier process took; false if part of it is taken already.
func (s *spans) mark(first, n uint32) bool {
	if first >= s.top {
		if first > s.top {
			s.free = append(s.free, span{s.top, first - s.top})
		}
		s.top = first + n
		s.high = max(s.high, s.top)
		return true
	}
	i, found := slices.BinarySearchFunc(
		s.free, first, func(f span, at uint32) int { return int(int64(f.first) - int64(at)) },
	)
	if !found {
		i--
	}
	if i < 0 || s.free[i].first+s.free[i].n < first+n {
		return false
	}
	f := s.free[i]
	var rest []span
	if f.first < first {
		rest = append(rest, span{f.first, first - f.first})
	}
	if end := f.first + f.n; first+n < end {
		rest = append(rest, span{first + n, end - first - n})
	}
	s.free = slices.Replace(s.free, i, i+1, rest...)
	return true
}
