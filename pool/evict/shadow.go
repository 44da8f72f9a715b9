package evict

import "github.com/kvagent/kvagent/pool"

// missed are the blocks of a look-up that LRU would have and the pool evicted.
type missed struct {
	blocks int
	unpaid int // of them, those not yet charged to the miss budget
}

// countMisses counts the missed blocks of a look-up by their ghosts, and makes those of LRU the
// newest. LRU would hit only the first of them, up to a gap. stored is the number of stored blocks
// before them.
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

// inLRU reports whether LRU would have the block of a ghost.
func (h *Hazard) inLRU(s *ghostSet, w int) bool {
	return s.info[w]&ghostRecent != 0 && h.kinds[s.kind[w]].recency.has(s.way[w].used)
}

// found records that a block is no longer lost.
func (h *Hazard) found(r *recency, used uint32) {
	r.lose(used, -1)
	h.lost--
}

// settleLookup ends a look-up of blocks of a kind, in which won entries were used that LRU would
// not have. A request that is repeated at once is charged once, and gains nothing.
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
	if h.judge.note(len(u.Prints), len(u.Entries), len(u.Entries)-won+m.blocks, h.lost, h.entries) {
		h.tables.forget()
	}
	h.missBudget.note(m.unpaid, 0, h.entries)
	if again {
		h.missBudget.record(-m.unpaid, 0, h.entries)
	} else {
		h.missBudget.record(won-m.unpaid, len(u.Prints), h.entries)
	}
}

// kindOf returns the kind of the blocks of a look-up; nil if none of them is stored or remembered.
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

// trim drops from LRU what exceeds its room.
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

// restartIdle restarts LRU for a kind that was not used for so long that times cannot be compared.
func (h *Hazard) restartIdle(k *kind, now uint32) {
	if now-k.recency.last <= longestSight {
		return
	}
	passed := k.recency.restart(now)
	h.lost -= passed
	h.missBudget.note(0, passed, h.entries)
	k.cross(&h.nodes.runs, &h.worths, true)
}

// drop drops the oldest span of LRU; false if only the newest, or those of the chain looked up
// last, remain. The caller has to call cross afterwards.
func (h *Hazard) drop(k *kind) bool {
	passed, ok := k.recency.drop()
	h.lost -= passed
	h.missBudget.note(0, passed, h.entries)
	return ok
}
