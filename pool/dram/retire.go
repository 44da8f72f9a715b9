package dram

import (
	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
)

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

func (c *core) retire(off int64) (page BadPage, fresh bool) {
	used, fresh := c.slabs.retire(off)
	page.Bytes, page.Pages = c.slabs.pageBytes(), c.slabs.badStats().Pages
	var entries []uint32
	for _, slot := range used {
		if e := c.owner(slot); e != none {
			entries = append(entries, e)
		}
	}
	for _, e := range entries {
		if r := &c.recs.All[e]; r.is(flagLive) && !r.is(flagDropped) { // the shards of one may share a page
			c.drop(e, pool.ByBadPage)
			c.stats.Dropped++
			page.Dropped++
		}
	}
	c.badDropped += uint64(page.Dropped)
	page.Off = off / page.Bytes * page.Bytes
	return page, fresh
}
