package dram

import "time"

// PartialAge is how long at least an entry may lack shards that nobody writes before it is reclaimed without any
// pressure; it is at most twice as long while there are reservations.
const PartialAge = 30 * time.Second

// age reclaims old partial entries, a bounded number with each reservation.
func (c *core) age() {
	now := c.now()
	if now.Sub(c.rotated) < PartialAge {
		return
	}
	for range maxPartials {
		if c.partialOld.oldest == none {
			c.rotate(now)
			return
		}
		c.reclaim(&c.partialOld)
	}
}

// rotate makes the young partial entries old ones.
func (c *core) rotate(now time.Time) {
	c.rotated = now
	for e := c.partialYoung.oldest; e != none; e = c.recs.All[e].newer {
		c.recs.All[e].hold ^= flagYoung | flagOld
	}
	c.partialOld, c.partialYoung = c.partialYoung, c.partialOld
	c.partialOld.flag, c.partialYoung.flag = flagOld, flagYoung
}

// reclaimPartial evicts one partial entry, the oldest first, or the end of a chain that hangs on
// it.
func (c *core) reclaimPartial() bool {
	for ; c.work.partials > 0; c.work.partials-- {
		l := &c.partialOld
		if l.oldest == none {
			l = &c.partialYoung
		}
		if l.oldest == none {
			return false
		}
		if c.reclaim(l) {
			return true
		}
	}
	return false
}

// reclaim evicts the oldest of a list of partial entries, or, if others hang on it, the end of one
// of their chains: so that no more goes than is needed. If that is held, the partial entry becomes
// a young one.
func (c *core) reclaim(l *list) bool {
	e := l.oldest
	end := e
	for child := c.recs.All[end].child; child != none && c.work.repairs > 0; child = c.recs.All[end].child {
		end = child
		c.work.repairs--
	}
	if c.evictable(end) {
		c.evict(end)
		return true
	}
	l.remove(c.recs.All, e)
	c.partialYoung.push(c.recs.All, e)
	return false
}
