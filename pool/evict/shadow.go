package evict

import "github.com/kvagent/kvagent/pool"

// missed are the blocks of a look-up that LRU would have and the pool gave up.
type missed struct {
	blocks int
	unpaid int // of them, those that the credit has not paid for
}

// mourn is told of the ghosts of the blocks that a look-up misses, which are about to be used now,
// behind so many that are stored. Those of LRU that it would hit are the first of them; all of LRU
// become the newest.
func (h *Hazard) countMisses(stored, step int, now uint32) (m missed) {
	hits := true
	for i, g := range h.misses {
		if hits = hits && g.way >= 0 && h.inLRU(g.set, g.way); hits {
			m.blocks++
		}
		if g.way < 0 {
			continue
		}
		info := &g.set.info[g.way]
		if !h.inLRU(g.set, g.way) {
			*info &^= ghostRecent | ghostPaid
			continue
		}
		used, r := g.set.way[g.way].used, &h.kinds[g.set.kind[g.way]].recency
		if *info&ghostPaid == 0 {
			*info |= ghostPaid
			h.found(r, used)
			if hits {
				m.unpaid++
			}
		}
		r.remove(used)
		r.add(r.notBefore(now - uint32((stored+i)/step)))
	}
	return m
}

// inLRU says that LRU would have the block of a ghost.
func (h *Hazard) inLRU(s *ghostSet, w int) bool {
	return s.info[w]&ghostRecent != 0 && h.kinds[s.kind[w]].recency.has(s.way[w].used)
}

// found notes that a lost block is lost no more.
func (h *Hazard) found(r *recency, used uint32) {
	r.lose(used, -1)
	h.lost--
}

// settleLookup ends a look-up of blocks of a kind, in which so many entries were used that LRU would not
// have. What is asked again at once is paid for once, and gives nothing.
func (h *Hazard) settleLookup(u *pool.Use, k *kind, m missed, won int, again bool) {
	for _, other := range h.kinds {
		if other != nil {
			other.spare = 0
		}
	}
	if k != nil {
		h.trim(k, k.entries)
		k.spare = max(0, m.blocks-won)
	}
	j := &h.judge
	j.lookups += uint64(len(u.Prints))
	j.hits += uint64(len(u.Entries))
	j.lru += uint64(len(u.Entries) - won + m.blocks)
	h.missBudget.note(m.unpaid, 0, h.entries)
	if again {
		h.record(-m.unpaid, 0)
	} else {
		h.record(won-m.unpaid, len(u.Prints))
	}
}

// kindOf is the kind of the blocks of a look-up; nil if the pool has none of them, and none is
// remembered.
func (h *Hazard) kindOf(u *pool.Use) *kind {
	for i, e := range u.Entries {
		if n := h.nodes.match(e, u.Prints[i]); n != nil {
			return h.kinds[n.kind]
		}
	}
	for _, g := range h.misses {
		if g.way >= 0 {
			return h.kinds[g.set.kind[g.way]]
		}
	}
	return nil
}

// trim has LRU give up what it has no room for.
func (h *Hazard) trim(k *kind, room int) {
	for dropped := false; ; dropped = true {
		if !k.recency.overfull(room, uint32(h.clock.now)) {
			if dropped {
				k.cross(&h.nodes.runs, &h.worths, false)
			}
			return
		}
		h.drop(k)
	}
}

// wake has LRU begin anew for a kind of which nothing was used for so long that times cannot be
// told apart.
func (h *Hazard) restartIdle(k *kind, now uint32) {
	if now-k.recency.last <= longestSight {
		return
	}
	passed := k.recency.restart(now)
	h.lost -= passed
	h.missBudget.note(0, passed, h.entries)
	k.cross(&h.nodes.runs, &h.worths, true)
}

// drop has LRU give up its oldest span; false if there is but the newest, or those of the chain
// looked up last. The caller has to call cross then.
func (h *Hazard) drop(k *kind) bool {
	passed, ok := k.recency.drop()
	h.lost -= passed
	h.missBudget.note(0, passed, h.entries)
	return ok
}
