package dram

import (
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/offheap"
	"github.com/kvagent/kvagent/pool/dram/slab"
)

// attach adds one shard of all entries to the index: shard 0 makes the entry, the others are linked
// to it in order.
func (s *scan) attach(shard uint8) bool {
	if !s.shards.has(shard) {
		return true
	}
	if shard == 0 && !s.table.Reserve(s.total) {
		return false
	}
	for n := range s.found {
		for len(s.found[n]) > 0 { // the slots of this shard come first
			slot := s.found[n][0]
			h := s.header(slot)
			if h.Shard() != shard {
				break
			}
			s.found[n] = s.found[n][1:]
			if !s.attachOne(h, slot) {
				h.Check.Store(0)
				if !s.twin(h) {
					s.stray(shard)
				}
			}
		}
	}
	return true
}

// stray counts a shard that belongs to no entry: its shard 0 had been cleared when the process was
// killed during an eviction. Two slots with one key and different sums would be damage.
func (s *scan) stray(shard uint8) {
	if shard == 0 {
		s.damaged.Add(1)
		return
	}
	s.strays++
}

// twin reports whether a shard is also stored in another slot, because the process was killed while
// the entry moved.
func (s *scan) twin(h *arena.Header) bool {
	c := s.core
	k := offheap.KeyOfWords(&h.Hash)
	e := c.findWords(makeIdent(s.spaces[h.Space()].realm, h.Group(), int(h.HashLen)), &k)
	if e == none || !c.isPresent(e, h.Shard()) {
		return false
	}
	_, at := c.shardCell(c.recs.All[e].head, int(h.Shard()))
	return at.Sum == h.Sum
}

func (s *scan) attachOne(h *arena.Header, slot uint32) bool {
	c := s.core
	sp := s.spaces[h.Space()]
	id := makeIdent(sp.realm, h.Group(), int(h.HashLen))
	k := offheap.KeyOfWords(&h.Hash)
	e := c.findWords(id, &k)
	shard := h.Shard()
	if shard == 0 {
		if e != none {
			return false
		}
		if e = c.restoreEntry(id, k, slot); e == none {
			return false
		}
	} else {
		if e == none || c.presentCount(e) != int(shard) { // all before it: they are added in order
			return false
		}
		_, last := c.shardCell(c.recs.All[e].head, int(shard)-1)
		last.Link = slot
		c.setPresent(e, shard)
	}
	*c.slabs.At(slot) = slab.Cell{Link: e | upward, Sum: h.Sum}
	c.slabs.Claim(s.claimed, slot)
	return true
}

// restoreEntry makes an entry that has shard 0.
func (c *core) restoreEntry(id ident, k offheap.Key, slot uint32) uint32 {
	e := c.newRecord()
	if e == none {
		return none
	}
	wide, ok := c.widen(e, len(c.group(id).classes))
	c.table.Grow(c.hashes)
	if !ok || !c.table.Put(c.seed.Hash(uint32(id), k), e) {
		c.freeRecord(e)
		return none
	}
	r := &c.recs.All[e]
	r.hash, r.ident, r.hold, r.head = k, id, flagLive|wide, slot
	c.setPresent(e, 0)
	c.realms[id.realm()].entries++
	c.stats.Partial++
	return e
}

// giveUpPartial frees the entries that lack shards; the engine saves them again.
func (s *scan) giveUpPartial() (n int) {
	c := s.core
	for e := uint32(1); e < c.high; e++ {
		r := &c.recs.All[e]
		if !r.is(flagLive) || c.states.All[e].present == c.group(r.ident).full {
			continue
		}
		slot := r.head
		for range c.presentCount(e) {
			next := c.slabs.At(slot).Link
			c.slabs.Unclaim(s.claimed, slot)
			s.header(slot).Check.Store(0)
			slot = next
		}
		c.table.Remove(c.seed.Hash(uint32(r.ident), r.hash), e)
		c.stats.Partial--
		c.leaveRealm(r.ident.realm())
		c.freeRecord(e)
		n++
	}
	return n
}
