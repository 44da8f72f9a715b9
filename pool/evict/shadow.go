package evict

import "github.com/kvagent/kvagent/pool"

// shadow is LRU with room for as many blocks as the pool has of a kind: a list of entries and lost blocks by last use. It is
// exact. A chain is used from its end to its start, so that a block that LRU has is one whose whole prefix LRU has.
//
//	the pool:  old entries | young entries
//	LRU:                   | young entries, lost blocks      as many in all
type shadow struct {
	newest, oldest uint32
	blocks         int
}

// links are those of an entry or a lost block.
func (h *Hazard) links(id uint32) *links {
	if id&lostBit != 0 {
		return &h.lost.at(id).recent
	}
	return &h.nodes.at(id).recent
}

// linkBelow puts a block right below another in the list; below none it becomes the newest.
func (h *Hazard) linkBelow(s *shadow, above, id uint32) {
	l := h.links(id)
	*l = links{newer: above, older: s.newest}
	if above == 0 {
		s.newest = id
	} else {
		up := h.links(above)
		l.older, up.older = up.older, id
	}
	if l.older == 0 {
		s.oldest = id
	} else {
		h.links(l.older).newer = id
	}
}

func (h *Hazard) unlink(s *shadow, id uint32) {
	l := h.links(id)
	if l.newer != 0 {
		h.links(l.newer).older = l.older
	} else {
		s.newest = l.older
	}
	if l.older != 0 {
		h.links(l.older).newer = l.newer
	} else {
		s.oldest = l.newer
	}
}

// swap puts a block that is in no list in the place of another.
func (h *Hazard) swap(s *shadow, from, to uint32) {
	l := *h.links(from)
	*h.links(to) = l
	if l.newer != 0 {
		h.links(l.newer).older = to
	} else {
		s.newest = to
	}
	if l.older != 0 {
		h.links(l.older).newer = to
	} else {
		s.oldest = to
	}
}

// touch makes a block of LRU the newest.
func (h *Hazard) touch(s *shadow, id uint32) {
	if s.newest != id {
		h.unlink(s, id)
		h.linkBelow(s, 0, id)
	}
}

// missed are the blocks of a look-up that LRU would have and the pool gave up.
type missed struct {
	ids    []uint32 // lost blocks
	unpaid int      // of them, those that the credit has not paid for
}

// mourn is told of the blocks of a look-up that are not stored. Those that LRU would have are the first of them; they become
// the newest.
func (h *Hazard) mourn(prints []uint64, now uint32) {
	m := &h.missed
	m.ids, m.unpaid = m.ids[:0], 0
	for _, print := range prints {
		id := h.lost.find(print)
		if id == 0 {
			break
		}
		m.ids = append(m.ids, id)
	}
	for i := len(m.ids) - 1; i >= 0; i-- {
		b := h.lost.at(m.ids[i])
		h.touch(&h.kinds[b.kind].shadow, m.ids[i])
		if b.used = now; !b.paid {
			b.paid = true
			m.unpaid++
		}
	}
}

// reckon ends a look-up, in which so many entries were used that LRU would not have: LRU gives up as many blocks as it has
// more now than the pool. What is asked again at once is paid for once, and gives nothing.
func (h *Hazard) reckon(u *pool.Use, won int, again bool) {
	lost := len(h.missed.ids)
	h.spare = spare{}
	if k := h.kindOf(u); k != nil {
		h.spare = spare{k, max(0, lost-won)}
		h.trim(k, k.entries)
	}
	j := &h.judge
	j.lookups += uint64(len(u.Prints))
	j.hits += uint64(len(u.Entries))
	j.lru += uint64(len(u.Entries) - won + lost)
	h.credit.note(h.missed.unpaid, 0, h.entries)
	if again {
		h.watch(-h.missed.unpaid, 0)
	} else {
		h.watch(won-h.missed.unpaid, len(u.Prints))
	}
}

// kindOf is the kind of the blocks of a look-up; nil if neither the pool nor LRU has any.
func (h *Hazard) kindOf(u *pool.Use) *kind {
	if ids := h.missed.ids; len(ids) > 0 {
		return h.kinds[h.lost.at(ids[0]).kind]
	}
	for i, e := range u.Entries {
		if n := h.nodes.like(e, u.Prints[i]); n != nil {
			return h.kinds[n.kind]
		}
	}
	return nil
}

// spare is how many blocks more than LRU the pool has to store after a look-up, and make room for.
type spare struct {
	kind   *kind
	blocks int
}

func (s *spare) of(k *kind) int {
	if s.kind == k {
		return s.blocks
	}
	return 0
}

// enterLRU takes an entry that is stored into LRU: in the place of the lost block that it was, or below the entry before it
// in its chain.
func (h *Hazard) enterLRU(k *kind, before, e uint32, n *node) {
	if id := h.lost.find(n.print); id != 0 {
		n.state |= stateRecent
		h.swap(&k.shadow, id, e)
		h.lost.remove(id)
		h.spare.blocks = max(0, h.spare.blocks-1)
		return
	}
	if b := h.nodes.known(before); b == nil || b.state&stateRecent == 0 || b.kind != n.kind {
		before = 0
	}
	h.welcome(k, before, e, n)
}

// welcome takes an entry into LRU, below another one.
func (h *Hazard) welcome(k *kind, above, e uint32, n *node) {
	n.state |= stateRecent
	k.shadow.blocks++
	h.linkBelow(&k.shadow, above, e)
}

// leaveLRU notes that an entry goes, used last at a time. If the policy chose it, LRU may have it still; else LRU loses it too.
func (h *Hazard) leaveLRU(k *kind, e uint32, n *node, used uint32) {
	switch {
	case n.state&stateRecent == 0:
	case e == h.victim:
		h.swap(&k.shadow, e, h.lost.put(n.print, n.kind, used))
	default:
		h.unlink(&k.shadow, e)
		k.shadow.blocks--
	}
	h.trim(k, k.entries+h.spare.of(k))
}

// trim lets LRU give up blocks until it has so many.
func (h *Hazard) trim(k *kind, room int) {
	s := &k.shadow
	for s.blocks > room && s.oldest != 0 {
		id := s.oldest
		h.unlink(s, id)
		s.blocks--
		if id&lostBit != 0 {
			if !h.lost.at(id).paid {
				h.credit.note(0, 1, h.entries)
			}
			h.lost.remove(id)
			continue
		}
		n := h.nodes.at(id)
		r := h.nodes.runOf(n)
		class, bin, used := r.class, r.bin, r.used
		k.young.take(&h.nodes, &h.worths, id, n)
		n.state &^= stateRecent
		k.old.join(&h.nodes, &h.worths, id, n, class, bin, used)
	}
}
