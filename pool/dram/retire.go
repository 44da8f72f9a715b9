package dram

import (
	"slices"

	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
)

// A page of the arena that cannot be read costs the entries on it. No slot of its slab is allocated
// again in this process; the slab's other entries stay until they go by themselves. The next
// process finds the page when it populates the arena.

// BadPage is a page that was retired.
type BadPage struct {
	Off, Bytes int64 // in the arena
	Dropped    int   // entries dropped because of it
	Pages      int64 // retired so far, including it
}

// Probe implements pool.Memory.
func (p *Pool) Probe(s pool.Slot) bool {
	return p.probe(s.Off, min(s.Off+int64(s.Len), int64(len(p.base)))) == 0
}

// probe retires the unreadable pages between two offsets of the arena, and returns their number.
func (p *Pool) probe(from, to int64) (bad int) {
	for off := max(from, 0) / p.info.PageBytes * p.info.PageBytes; off < to; off += p.info.PageBytes {
		if !pagefault.Readable(p.base, off) {
			var page BadPage
			fresh := false
			if p.locked(func(c *core) { page, fresh = c.retire(off) }); fresh && p.onBadPage != nil {
				p.onBadPage(page)
			}
			bad++
		}
	}
	return bad
}

// retire retires the page at an offset of the arena, with the slabs on it, and drops the entries
// there. fresh is false if it was retired before.
func (c *core) retire(off int64) (page BadPage, fresh bool) {
	s := &c.slabs
	page.Off, page.Bytes = off/s.page*s.page, s.page
	if fresh = !s.badPages[page.Off]; fresh {
		s.badPages[page.Off] = true
		s.bad.Pages++
	}
	page.Pages = s.bad.Pages
	to := min(page.Off+page.Bytes, int64(len(s.slab))*s.bytes)
	var entries []uint32
	for n := int32(page.Off / s.bytes); int64(n)*s.bytes < to; n++ {
		s.retireSlab(n)
		if s.slab[n].class == noClass {
			continue
		}
		size := s.slotBytes(s.slab[n].class)
		for place, busy := range s.inUse(n) {
			if at := int64(n)*s.bytes + int64(place)*size; busy && at < to && page.Off < at+size {
				entries = append(entries, c.owner(s.slot(n, uint32(place))))
			}
		}
	}
	for _, e := range entries { // none while it is being created; the shards of one may share a page
		if r := &c.recs.All[e]; r.is(flagLive) && !r.is(flagDropped) {
			c.drop(e, pool.ByBadPage)
			c.stats.Dropped++
			page.Dropped++
		}
	}
	s.bad.Dropped += uint64(page.Dropped)
	return page, fresh
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
		c := &s.class[b.class]
		c.retired += int(c.perSlab - b.used)
	}
	b.bad = true
	s.bad.Bytes += s.bytes
}
