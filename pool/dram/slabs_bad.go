package dram

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

// retire retires the slabs that overlap the page at an offset of the arena, and returns their slots
// in use on that page. fresh is false if the page was retired before.
func (s *slabs) retire(off int64) (used []uint32, fresh bool) {
	number := off / s.bad.page
	if _, again := s.bad.pages[number]; !again {
		s.bad.pages[number] = struct{}{}
		fresh = true
	}
	from := number * s.bad.page
	to := min(from+s.bad.page, int64(len(s.slab))*s.bytes)
	for n := int32(from / s.bytes); int64(n)*s.bytes < to; n++ {
		s.retireSlab(n)
		if s.slab[n].class == noClass {
			continue
		}
		start, size := int64(n)*s.bytes, s.slotBytes(s.slab[n].class)
		for place, busy := range s.inUse(n) {
			if at := start + int64(place)*size; busy && at < to && from < at+size {
				used = append(used, s.slot(n, uint32(place)))
			}
		}
	}
	return used, fresh
}

// retireSlab takes a slab out of use; its used slots stay.
func (s *slabs) retireSlab(n int32) {
	b := &s.slab[n]
	if b.bad {
		return
	}
	if b.class == noClass {
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

// badStats returns the statistics of bad memory.
func (s *slabs) badStats() pool.BadMemory {
	b := pool.BadMemory{
		Pages: int64(len(s.bad.pages)), Bytes: s.bad.slabs * s.bytes,
		MaxPages: arena.MaxBadPages, MaxBytes: int64(len(s.slab)) * s.bytes / partBad,
	}
	if s.file != nil {
		b.Faults = s.file.Faulted()
	}
	return b
}

// pageBytes returns the bytes of a page.
func (s *slabs) pageBytes() int64 { return s.bad.page }
