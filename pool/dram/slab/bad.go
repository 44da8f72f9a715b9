package slab

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// A page of the arena that cannot be read costs the entries on it. No slot of its slab is allocated
// again in this process; the slab's other entries stay until they go by themselves. The next
// process finds the page when it populates the arena.

// partBad is the part of its bytes without which a pool is not healthy.
const partBad = 8

// badMemory are the bad pages of the slabs.
type badMemory struct {
	page  int64              // bytes of a page
	pages map[int64]struct{} // retired, by number
	slabs int64              // retired
}

// Retire retires the slabs that overlap the page at an offset of the arena, and returns their slots
// in use on that page. fresh is false if the page was retired before.
func (s *Slabs) Retire(off int64) (used []uint32, fresh bool) {
	number := off / s.bad.page
	if _, again := s.bad.pages[number]; !again {
		s.bad.pages[number] = struct{}{}
		fresh = true
	}
	from := number * s.bad.page
	to := min(from+s.bad.page, int64(len(s.slab))*s.bytes)
	for n := int32(from / s.bytes); int64(n)*s.bytes < to; n++ {
		s.retireSlab(n)
		if s.slab[n].class == NoClass {
			continue
		}
		start, size := int64(n)*s.bytes, s.SlotBytes(s.slab[n].class)
		for place, busy := range s.InUse(n) {
			if at := start + int64(place)*size; busy && at < to && from < at+size {
				used = append(used, s.Slot(n, uint32(place)))
			}
		}
	}
	return used, fresh
}

// retireSlab takes a slab out of use; its used slots stay.
func (s *Slabs) retireSlab(n int32) {
	b := &s.slab[n]
	if b.bad {
		return
	}
	if b.class == NoClass {
		s.unused = slices.DeleteFunc(s.unused, func(other int32) bool { return other == n })
	} else {
		if !s.full(n) {
			s.leaveRoom(n)
		}
		c := &s.class[b.class]
		c.retired += int(c.perSlab - b.used)
	}
	b.bad = true
	s.bad.slabs++
}

// BadStats returns the statistics of bad memory.
func (s *Slabs) BadStats() pool.BadMemory {
	b := pool.BadMemory{
		Pages: int64(len(s.bad.pages)), Bytes: s.bad.slabs * s.bytes,
		MaxPages: arena.MaxBadPages, MaxBytes: int64(len(s.slab)) * s.bytes / partBad,
	}
	if s.file != nil {
		b.Faults = s.file.Faulted()
	}
	return b
}

// PageBytes returns the bytes of a page.
func (s *Slabs) PageBytes() int64 { return s.bad.page }

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
