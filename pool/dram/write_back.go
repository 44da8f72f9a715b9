package dram

import "github.com/kvagent/kvagent/pool"

// Coldest implements pool.Memory: it returns the least recently used entries, at most
// lockStride. A policy's next victims are unpredictable, so with a policy half of the result comes
// from a round through all entries.
func (p *Pool) Coldest(out []pool.Cold) int {
	out = out[:min(len(out), lockStride)]
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	if p.core.advisor != nil {
		n = p.core.nextInRound(out[:len(out)/2])
	}
	return n + p.core.leastRecent(out[n:])
}

// nextInRound fills out with the next entries of the round.
func (c *core) nextInRound(out []pool.Cold) (n int) {
	for looked := 0; n < len(out) && looked < lockStride; looked++ {
		if c.round++; c.round >= c.high {
			c.round = none
			continue
		}
		if c.recs.All[c.round].is(flagRecent) && c.cold(c.round, &out[n]) {
			n++
		}
	}
	return n
}

// leastRecent fills out with the least recently used entries.
func (c *core) leastRecent(out []pool.Cold) (n int) {
	e := c.recent.oldest
	for looked := 0; e != none && n < len(out) && looked < lockStride; looked, e = looked+1, c.recs.All[e].newer {
		if c.cold(e, &out[n]) {
			n++
		}
	}
	return n
}

// cold names an entry; false if its space is not open or was reset.
func (c *core) cold(e uint32, out *pool.Cold) bool {
	r := &c.recs.All[e]
	realm := &c.realms[r.ident.realm()]
	id, open := c.byPrint[realm.space.spec.Fingerprint]
	if realm.over || !open {
		return false
	}
	*out = pool.Cold{Space: id, Group: r.ident.group(), Hash: r.hash.Bytes(r.ident.hashLen())}
	return true
}

// spot is an entry's place in the order of eviction: its neighbours.
type spot struct{ newer, older cursor }

// ReadWithoutTouch implements pool.Memory.
func (p *Pool) ReadWithoutTouch(b *pool.Batch, read func(s pool.Slot) pool.Status) {
	for i := range b.Hashes.N {
		var was spot
		b.Status[i], b.Slots[i], was = p.pinUntouched(b, i)
		if b.Status[i] != pool.OK {
			continue
		}
		b.Status[i] = read(b.Slots[i])
		p.unpinUntouched(b.Slots[i].Ref, b.Status[i], &was)
	}
}

// pinUntouched pins an entry and returns its place in the order of eviction.
func (p *Pool) pinUntouched(b *pool.Batch, i int) (pool.Status, pool.Slot, spot) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	id, sp, ok := c.identOf(b.Space, b.Group, b.Hashes.Len)
	if !ok || int(b.Shard) >= sp.spec.Shards {
		return pool.Invalid, pool.Slot{}, spot{}
	}
	e := c.find(id, b.Hashes.At(i))
	if e == none || !c.recs.All[e].is(flagVisible) {
		return pool.Missing, pool.Slot{}, spot{}
	}
	var was spot
	alone, marks := c.recs.All[e].is(flagRecent), c.recs.All[e].hold&unused
	if alone {
		was = c.spotOf(e)
	}
	status, slot := c.acquire(e, b.Shard, sp.groups[b.Group].bytes)
	if status == pool.OK {
		c.recs.All[e].hold |= marks
	}
	if status == pool.OK && alone {
		c.recs.All[e].hold |= flagUntouched
	}
	return status, slot, was
}

// unpinUntouched ends the pin. An entry that was not used otherwise meanwhile returns to its place,
// and its last use in the file stays.
func (p *Pool) unpinUntouched(ref pool.Ref, status pool.Status, was *spot) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	e, ok := c.deref(ref)
	if !ok || c.recs.All[e].pins() == 0 {
		return
	}
	if status == pool.Corrupt && !c.recs.All[e].is(flagDropped) {
		c.drop(e, pool.ByCorruption)
		c.stats.Dropped++
	}
	if !c.recs.All[e].is(flagUntouched) {
		c.tick()
		c.unpinEntry(e, &cursor{})
		return
	}
	c.recs.All[e].hold &^= flagUntouched
	if c.unhold(e) {
		at := c.below(was)
		c.settle(e, &at)
	}
}

// spotOf returns the place of an entry of the recent list.
func (c *core) spotOf(e uint32) spot {
	return spot{newer: c.cursorAt(c.recs.All[e].newer), older: c.cursorAt(c.recs.All[e].older)}
}

func (c *core) cursorAt(e uint32) cursor {
	if e == none {
		return cursor{}
	}
	return cursor{entry: e, generation: c.states.All[e].generation}
}

// below returns the entry that a spot is just older than now: its newer neighbour if that is still
// in the list, or the entry above its older one.
func (c *core) below(was *spot) cursor {
	if older := c.above(&was.older); c.above(&was.newer) == none && older != none {
		return c.cursorAt(c.recs.All[older].newer)
	}
	return was.newer
}
