package slab

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// Limits of what is retired. A page of the arena that cannot be read costs the entries in it, and
// is not used again in the life of the pool's file. Ranges of bytes are retired, not slots: a slab
// that is cut into slots of another size keeps them.
const (
	partBad   = 16 // a pool with 1/16 of its bytes out of use is not healthy
	maxRanges = 16 // pages retired one by one in a slab; with another one the rest of the slab is retired as well
)

// badRange is bytes of a slab.
type badRange struct{ from, to int64 }

// badMemory is what the slabs know of bad pages.
type badMemory struct {
	page   int64                // bytes of a page
	ranges map[int32][]badRange // by slab, sorted, at most maxRanges
	out    map[uint32]bool      // slots that overlap a range, as slabs are cut now, neither in use nor free
	stats  pool.BadMemory
}

// Retire takes the slots that overlap the page at an offset of the arena out of use, and returns
// those of them that are in use; fresh is false if it was retired before, by itself or with its
// slab.
func (s *Slabs) Retire(off int64) (used []uint32, fresh bool) {
	from := off / s.bad.page * s.bad.page
	to := min(from+s.bad.page, int64(len(s.slab))*s.bytes)
	for n := int32(from / s.bytes); int64(n)*s.bytes < to; n++ {
		start := int64(n) * s.bytes
		r := badRange{max(from-start, 0), min(to-start, s.bytes)}
		if !s.covered(n, r) {
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

func (s *Slabs) covered(n int32, r badRange) bool {
	return slices.ContainsFunc(s.bad.ranges[n], func(b badRange) bool { return b.from <= r.from && r.to <= b.to })
}

// addBad notes a range of a slab. Where there are too many of them the whole slab is one.
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

// takeOut takes the free slots of a slab that overlap its bad ranges out of use. It returns those
// in use that overlap r: they leave when they are given back.
func (s *Slabs) takeOut(n int32, r badRange) (used []uint32) {
	b := &s.slab[n]
	if b.class == NoClass {
		return nil
	}
	c := &s.class[b.class]
	room := !s.full(n) && n != s.draining
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
	s.weigh(c)
	return used
}

// relinkFree makes the list of a slab's free slots anew, without those that are out of use.
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

// leave puts a slot that is not in use out of use.
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

// badPlaces are the places of a slab, cut for a class, that overlap its bad ranges; each once.
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

// unusedFor is the place in unused of the slab that a class is given next; -1: there is none.
func (s *Slabs) unusedFor(class int32) int {
	return s.usableOf(s.unused, class)
}

// usableOf is the place of the last of these slabs that has a slot for a class; -1: none has.
func (s *Slabs) usableOf(slabs []int32, class int32) int {
	for i := len(slabs) - 1; i >= 0; i-- {
		if s.usable(slabs[i], class) {
			return i
		}
	}
	return -1
}

// cutAround puts the bad slots of a slab that was cut just now out of use.
func (s *Slabs) cutAround(n int32) {
	if s.bad.ranges[n] == nil {
		return
	}
	for _, place := range s.badPlaces(n, s.slab[n].class) {
		s.leave(uint32(n)<<s.slotBits | place)
	}
}

// uncut forgets the slots of a slab that go with its cut.
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

// pass is the first place of a slab from one on that is not out of use.
func (s *Slabs) pass(n int32, place uint32) uint32 {
	for s.slab[n].retired > 0 && s.bad.out[uint32(n)<<s.slotBits|place] {
		place++
	}
	return place
}

// BadStats is what Stats says of bad memory.
func (s *Slabs) BadStats() pool.BadMemory {
	b := s.bad.stats
	b.MaxPages, b.MaxBytes = arena.MaxBadPages, int64(len(s.slab))*s.bytes/partBad
	if s.file != nil {
		b.Faults = s.file.Faulted()
	}
	return b
}

// BadSize is the bytes of a page, and how many were retired.
func (s *Slabs) BadSize() (page, pages int64) { return s.bad.page, s.bad.stats.Pages }

// BadRanges is how many stretches of a slab are out of use.
func (s *Slabs) BadRanges(n int32) int { return len(s.bad.ranges[n]) }
