package dram

import "math/bits"

// attach puts one shard of all entries in the index: shard 0 makes the entry, the others are hung on it in their order.
func (s *scan) attach(shard uint8) bool {
	if s.shards&(1<<shard) == 0 {
		return true
	}
	if shard == 0 && !s.table.reserve(s.total) {
		return false
	}
	for _, slots := range s.found {
		for _, slot := range slots {
			h := s.header(slot)
			if h.shard() != shard {
				continue
			}
			if !s.attachOne(h, slot) {
				h.check.Store(0)
				if !s.twin(h) {
					s.stray(shard)
				}
			}
		}
	}
	return true
}

// stray counts a shard that belongs to no entry: one whose shard 0 was cleared already when the process was killed in the middle
// of an eviction. Two slots with one key and different sums would be damage.
func (s *scan) stray(shard uint8) {
	if shard == 0 {
		s.damaged.Add(1)
		return
	}
	s.strays++
}

// twin says whether a shard is stored in another slot too: the process was killed while the entry
// moved.
func (s *scan) twin(h *header) bool {
	c := s.core
	k := keyOf(&h.hash)
	e := c.findWords(makeIdent(s.spaces[h.space].realm, h.group(), int(h.hashLen)), &k)
	if e == none || c.lives.all[e].present&(1<<h.shard()) == 0 {
		return false
	}
	_, at := c.shardCell(c.recs.all[e].head, int(h.shard()))
	return at.sum == h.sum
}

func (s *scan) attachOne(h *header, slot uint32) bool {
	c := s.core
	sp := s.spaces[h.space]
	id := makeIdent(sp.realm, h.group(), int(h.hashLen))
	k := keyOf(&h.hash)
	e := c.findWords(id, &k)
	shard := int(h.shard())
	if shard == 0 {
		if e != none {
			return false
		}
		if e = c.restoreEntry(id, k, slot); e == none {
			return false
		}
	} else {
		if e == none || c.lives.all[e].present != 1<<shard-1 {
			return false
		}
		_, last := c.shardCell(c.recs.all[e].head, shard-1)
		last.link = slot
		c.lives.all[e].present |= 1 << shard
	}
	*c.slabs.at(slot) = cell{link: e | upward, sum: h.sum}
	c.slabs.claim(s.claimed, slot)
	return true
}

// restoreEntry makes an entry that has shard 0.
func (c *core) restoreEntry(id ident, k key, slot uint32) uint32 {
	e := c.newRecord()
	if e == none {
		return none
	}
	c.table.grow(c.hashes)
	if !c.table.put(c.seed.hash(id, k), e) {
		c.freeRecord(e)
		return none
	}
	r := &c.recs.all[e]
	r.hash, r.ident, r.hold, r.head = k, id, flagLive, slot
	c.lives.all[e].present = 1
	c.realms[id.realm()].entries++
	c.stats.Partial++
	return e
}

// giveUpPartial frees the entries that lack shards: the engine saves them again.
func (s *scan) giveUpPartial() (n int) {
	c := s.core
	for e := uint32(1); e < c.high; e++ {
		r := &c.recs.all[e]
		if !r.is(flagLive) || c.lives.all[e].present == c.group(r.ident).full {
			continue
		}
		slot := r.head
		for range bits.OnesCount16(c.lives.all[e].present) {
			next := c.slabs.at(slot).link
			c.slabs.unclaim(s.claimed, slot)
			s.header(slot).check.Store(0)
			slot = next
		}
		c.table.remove(c.seed.hash(r.ident, r.hash), e)
		c.stats.Partial--
		c.leaveRealm(r.ident.realm())
		c.freeRecord(e)
		n++
	}
	return n
}
