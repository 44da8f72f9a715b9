package dram

import "github.com/kvagent/kvagent/pool"

// Commit implements pool.Slots. It clears the Ref of each slot, so a second Commit does nothing.
func (p *Pool) Commit(slots []pool.Slot, epoch uint32, status []pool.Status) {
	var at cursor
	for from := 0; from < len(slots); from += lockStride {
		to := min(from+lockStride, len(slots))
		p.commitPart(slots[from:to], epoch, status[from:to], &at)
	}
}

func (p *Pool) commitPart(slots []pool.Slot, epoch uint32, status []pool.Status, at *cursor) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.core.tick()
	for i := range slots {
		status[i] = p.core.commit(&slots[i], epoch, status[i], at)
		slots[i].Ref = 0
	}
	p.core.announce()
}

func (c *core) commit(s *pool.Slot, epoch uint32, status pool.Status, at *cursor) pool.Status {
	e, ok := c.deref(s.Ref)
	if !ok || !c.isWriting(e, s.Shard) {
		if status == pool.OK {
			return pool.Stale
		}
		return status
	}
	r := &c.recs.All[e]
	c.endWriting(e, s.Shard)
	m := &c.realms[r.ident.realm()]
	if status == pool.OK && (r.is(flagDropped) || m.over || m.space.epoch != epoch) {
		status = pool.Stale // its epoch, or that in which its bytes were computed, is over
	}
	if status == pool.OK {
		c.setPresent(e, s.Shard)
		slot, cell := c.shardCell(r.head, int(s.Shard))
		cell.Sum = s.Sum
		c.persistShard(e, slot, s.Shard, s.Sum)
	}
	c.settle(e, at)
	return status
}

// Acquire implements pool.Slots.
func (p *Pool) Acquire(b *pool.Batch) {
	for from := 0; from < b.Hashes.N; from += lockStride {
		p.acquirePart(b, from, min(from+lockStride, b.Hashes.N))
	}
}

func (p *Pool) acquirePart(b *pool.Batch, from, to int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	id, sp, ok := c.identOf(b.Space, b.Group, b.Hashes.Len)
	if !ok || int(b.Shard) >= sp.spec.Shards {
		for i := from; i < to; i++ {
			b.Status[i], b.Slots[i] = pool.Invalid, pool.Slot{}
		}
		return
	}
	v := c.walk(&b.Hashes)
	for i := from; i < to; i += groupLen {
		n := min(groupLen, to-i)
		c.look(id, &v, i, n)
		for j, e := range c.probe.entry[:n] {
			b.Status[i+j], b.Slots[i+j] = c.acquire(e, b.Shard, sp.groups[b.Group].bytes)
		}
	}
}

func (c *core) acquire(e uint32, shard uint8, bytes int64) (pool.Status, pool.Slot) {
	switch {
	case e == none:
		return pool.Missing, pool.Slot{}
	case c.recs.All[e].pins() == maxPins:
		return pool.Busy, pool.Slot{}
	case c.owner(c.recs.All[e].head) != e: // the slot was given to another entry
		return pool.Corrupt, pool.Slot{}
	}
	c.pinEntry(e, bytes)
	return pool.OK, c.slot(e, shard)
}

// Release implements pool.Slots. It clears the Ref of each slot, so a second Release does nothing.
func (p *Pool) Release(slots []pool.Slot, status []pool.Status) {
	var at cursor
	for from := 0; from < len(slots); from += lockStride {
		to := min(from+lockStride, len(slots))
		p.releasePart(slots[from:to], status[from:to], &at)
	}
}

func (p *Pool) releasePart(slots []pool.Slot, status []pool.Status, at *cursor) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.core.tick()
	for i := range slots {
		e, ok := p.core.deref(slots[i].Ref)
		slots[i].Ref = 0
		if !ok || p.core.recs.All[e].pins() == 0 {
			continue
		}
		if status[i] == pool.Corrupt && !p.core.recs.All[e].is(flagDropped) {
			p.core.drop(e, pool.ByCorruption)
			p.core.stats.Dropped++
		}
		p.core.unpinEntry(e, at)
	}
}
