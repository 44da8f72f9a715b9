package slab

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// Limits of retired memory. A page of the arena that cannot be read costs the entries on it, and is
// not used again as long as the pool's file exists. Ranges of bytes are retired, not slots, so they
// stay when a slab is cut into slots of another size.
const (
	partBad   = 16 // a pool with 1/16 of its bytes out of use is not healthy
	maxRanges = 16 // pages retired one by one in a slab; one more retires the rest of the slab
)

// badRange is a range of bytes of a slab.
type badRange struct{ from, to int64 }

// badMemory are the bad pages of the slabs.
type badMemory struct {
	page   int64                // bytes of a page
	ranges map[int32][]badRange // by slab, sorted, at most maxRanges
	out    map[uint32]bool      // slots that overlap a range, as slabs are cut now, and are neither used nor free
	stats  pool.BadMemory
}

// Retire retires the slots that overlap the page at an offset of the arena, and returns those of
// them in use. fresh is false if the page was retired before, alone or with its slab.
func (s *Slabs) Retire(off int64) (used []uint32, fresh bool) {
	from := off / s.bad.page * s.bad.page
	to := min(from+s.bad.page, int64(len(s.slab))*s.bytes)
	for n := int32(from / s.bytes); int64(n)*s.bytes < to; n++ {
		start := int64(n) * s.bytes
		r := badRange{max(from-start, 0), min(to-start, s.bytes)}
		if !slices.ContainsFunc(s.bad.ranges[n], func(b badRange) bool { return b.from <= r.from && r.to <= b.to }) {
			fresh = true
			s.addBad(n, r)
		}
		used = append(used, s.takeOut(n, r)...)
	}
	if fresh {
		s.bad.stats.Pages++
	}
	return used, fresh
}

// addBad records a range of a slab, or the whole slab if it has too many.
func (s *Slabs) addBad(n int32, r badRange) {
	if s.bad.ranges == nil {
		s.bad.ranges, s.bad.out = map[int32][]badRange{}, map[uint32]bool{}
	}
	had := s.bad.ranges[n]
	if len(had) == maxRanges {
		for _, b := range had {
			s.bad.stats.Bytes -= b.to - b.from
		}
		had, r = nil, badRange{0, s.bytes}
	}
	at, _ := slices.BinarySearchFunc(had, r, func(a, b badRange) int { return int(a.from - b.from) })
	s.bad.ranges[n] = slices.Insert(had, at, r)
	s.bad.stats.Bytes += r.to - r.from
}

// takeOut retires the free slots of a slab that overlap its bad ranges. It returns those in use
// that overlap r; they are retired when they are given back.
func (s *Slabs) takeOut(n int32, r badRange) (used []uint32) {
	b := &s.slab[n]
	if b.class == NoClass {
		return nil
	}
	c := &s.class[b.class]
	room := !s.full(n)
	inUse := s.InUse(n)
	for _, place := range s.badPlaces(n, b.class) {
		slot := uint32(n)<<s.slotBits | place
		if place < b.fresh && inUse[place] {
			if size := int64(c.bytes); int64(place)*size < r.to && r.from < int64(place+1)*size {
				used = append(used, slot)
			}
		} else if !s.bad.out[slot] {
			s.leave(slot)
		}
	}
	s.relinkFree(n)
	if room && s.full(n) {
		s.leaveRoom(n)
	}
	return used
}

// relinkFree rebuilds the list of a slab's free slots without retired ones.
func (s *Slabs) relinkFree(n int32) {
	b := &s.slab[n]
	at := b.free
	b.free = 0
	for at != 0 {
		place := at - 1
		c := &s.cells.All[b.cells+place]
		at = c.Link
		if !s.bad.out[uint32(n)<<s.slotBits|place] {
			c.Link, b.free = b.free, place+1
		}
	}
}

// leave retires a slot that is not in use.
func (s *Slabs) leave(slot uint32) {
	b := &s.slab[slot>>s.slotBits]
	s.bad.out[slot] = true
	b.retired++
	s.class[b.class].retired++
}

// IsBad reports whether a slot overlaps a bad range.
func (s *Slabs) IsBad(slot uint32) bool {
	if len(s.bad.ranges) == 0 {
		return false
	}
	n := int32(slot >> s.slotBits)
	size := int64(s.class[s.slab[n].class].bytes)
	from := int64(slot&(1<<s.slotBits-1)) * size
	return slices.ContainsFunc(s.bad.ranges[n], func(b badRange) bool { return from < b.to && b.from < from+size })
}

// badPlaces returns the places of a slab, cut for a class, that overlap its bad ranges, each once.
func (s *Slabs) badPlaces(n, class int32) (places []uint32) {
	c := &s.class[class]
	next := int64(0)
	for _, r := range s.bad.ranges[n] {
		size := int64(c.bytes)
		for at := max(next, r.from/size); at*size < r.to && at < int64(c.perSlab); at++ {
			places = append(places, uint32(at))
			next = at + 1
		}
	}
	return places
}

// usable reports whether a slab would have a slot for a class.
func (s *Slabs) usable(n, class int32) bool {
	return s.bad.ranges[n] == nil || len(s.badPlaces(n, class)) < int(s.class[class].perSlab)
}

// usableOf returns the index of the last of these slabs with a slot for a class; -1: none.
func (s *Slabs) usableOf(slabs []int32, class int32) int {
	for i := len(slabs) - 1; i >= 0; i-- {
		if s.usable(slabs[i], class) {
			return i
		}
	}
	return -1
}

// cutAround retires the bad slots of a slab that was just cut.
func (s *Slabs) cutAround(n int32) {
	if s.bad.ranges[n] == nil {
		return
	}
	for _, place := range s.badPlaces(n, s.slab[n].class) {
		s.leave(uint32(n)<<s.slotBits | place)
	}
}

// uncut drops the retired slots of a slab that is no longer cut.
func (s *Slabs) uncut(n int32) {
	if s.slab[n].retired == 0 {
		return
	}
	for _, place := range s.badPlaces(n, s.slab[n].class) {
		delete(s.bad.out, uint32(n)<<s.slotBits|place)
	}
	s.class[s.slab[n].class].retired -= int(s.slab[n].retired)
	s.slab[n].retired = 0
}

// pass returns the first place of a slab from place on that is not retired.
func (s *Slabs) pass(n int32, place uint32) uint32 {
	for s.slab[n].retired > 0 && s.bad.out[uint32(n)<<s.slotBits|place] {
		place++
	}
	return place
}

// BadStats returns the statistics of bad memory.
func (s *Slabs) BadStats() pool.BadMemory {
	b := s.bad.stats
	b.MaxPages, b.MaxBytes = arena.MaxBadPages, int64(len(s.slab))*s.bytes/partBad
	if s.file != nil {
		b.Faults = s.file.Faulted()
	}
	return b
}

// BadSize returns the bytes of a page, and how many pages were retired.
func (s *Slabs) BadSize() (page, pages int64) { return s.bad.page, s.bad.stats.Pages }

// BadRanges returns the number of retired ranges of a slab.
func (s *Slabs) BadRanges(n int32) int { return len(s.bad.ranges[n]) }

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
