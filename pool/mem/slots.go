package mem

import "github.com/kvagent/kvagent/pool"

// Reserve implements pool.Slots.
func (p *Pool) Reserve(b *pool.Batch) {
	need := p.reserve(b, false)
	p.mu.Lock()
	f := p.pressure
	p.mu.Unlock()
	if need > 0 && f != nil && f(need) {
		need = p.reserve(b, true)
	}
	if need > 0 {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, s := range b.Status {
			if s == pool.Busy {
				p.stats.Busy++
			}
		}
	}
}

// reserve decides the batch, or on a retry what was Busy in it, and returns the bytes that found no
// room.
func (p *Pool) reserve(b *pool.Batch, retry bool) (need int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reclaimOld()
	parent := p.find(b.Space, b.Group, b.Parent)
	full := false
	for i := 0; i < b.Hashes.N; i++ {
		var e *entry
		if retry && b.Status[i] != pool.Busy {
			e = p.find(b.Space, b.Group, b.Hashes.At(i))
		} else {
			e = p.reserveOne(b, i, parent, &full)
		}
		if b.Status[i] == pool.Busy {
			need += p.entryBytes(b.Space, b.Group)
		}
		parent = e
	}
	return need
}

func (p *Pool) reserveOne(b *pool.Batch, i int, parent *entry, full *bool) *entry {
	hash := b.Hashes.At(i)
	b.Slots[i] = pool.Slot{}
	if status := p.admit(b, hash); status != pool.OK {
		b.Status[i] = status
		return nil
	}
	e := p.find(b.Space, b.Group, hash)
	if e == nil {
		if *full {
			b.Status[i] = pool.Busy
			return nil
		}
		if e = p.create(b, hash, parent); e == nil {
			*full = true
			b.Status[i] = pool.Busy
			return nil
		}
	}
	if e.place != nil {
		p.recent.MoveToFront(e.place)
	}
	link(e, parent)
	s := &e.shards[b.Shard]
	if b.Status[i] = s.status(); b.Status[i] == pool.OK {
		s.writing = true
		b.Slots[i] = e.slot(b.Shard)
	}
	return e
}

func (p *Pool) admit(b *pool.Batch, hash []byte) pool.Status {
	if !p.isOpen(b.Space) || len(hash) < 1 || len(hash) > pool.MaxHashLen {
		return pool.Invalid
	}
	s := p.spaces[b.Space]
	if int(b.Group) >= len(s.spec.Groups) || int(b.Shard) >= s.spec.Shards {
		return pool.Invalid
	}
	if b.Epoch != s.epoch {
		return pool.Stale
	}
	return pool.OK
}

func (p *Pool) entryBytes(s pool.SpaceID, group uint8) (n int64) {
	for _, b := range p.spaces[s].spec.Groups[group].ShardBytes {
		n += slotBytes(b)
	}
	return n
}

// create takes slots for all shards, or frees all again; the parent must not be evicted for its own
// suffix.
func (p *Pool) create(b *pool.Batch, hash []byte, parent *entry) *entry {
	if parent != nil {
		parent.pins++
		defer func() { parent.pins-- }()
	}
	var shards []shard
	for _, n := range p.spaces[b.Space].spec.Groups[b.Group].ShardBytes {
		off, ok := p.allocate(slotBytes(n), shards)
		if !ok {
			for _, s := range shards {
				p.free.give(s.off, slotBytes(s.len))
			}
			return nil
		}
		shards = append(shards, shard{off: off, len: n})
	}
	p.lastRef++
	e := &entry{
		key: entryKey{b.Space, b.Group, pool.MakeHash(hash)}, ref: p.lastRef, shards: shards,
		children: map[*entry]struct{}{},
	}
	p.entries[e.key], p.refs[e.ref] = e, e
	return e
}

// Peek implements pool.Slots.
func (p *Pool) Peek(b *pool.Batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := 0; i < b.Hashes.N; i++ {
		hash := b.Hashes.At(i)
		if b.Status[i] = p.admit(b, hash); b.Status[i] != pool.OK {
			continue
		}
		if e := p.find(b.Space, b.Group, hash); e != nil {
			b.Status[i] = e.shards[b.Shard].status()
		}
	}
}

// status returns Exists or InProgress for a shard that is stored or being written, OK for another.
func (s *shard) status() pool.Status {
	switch {
	case s.present:
		return pool.Exists
	case s.writing:
		return pool.InProgress
	}
	return pool.OK
}

// Commit implements pool.Slots. It clears the Ref of each slot, so a second Commit does nothing.
func (p *Pool) Commit(slots []pool.Slot, epoch uint32, status []pool.Status) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range slots {
		p.commitOne(&slots[i], epoch, &status[i])
	}
}

func (p *Pool) commitOne(slot *pool.Slot, epoch uint32, status *pool.Status) {
	e := p.refs[slot.Ref]
	slot.Ref = 0
	if e == nil || int(slot.Shard) >= len(e.shards) || !e.shards[slot.Shard].writing {
		if *status == pool.OK {
			*status = pool.Stale
		}
		return
	}
	s := &e.shards[slot.Shard]
	s.writing = false
	if *status == pool.OK && (e.dropped || epoch != p.spaces[e.key.space].epoch) {
		*status = pool.Stale
	}
	if *status == pool.OK {
		s.present, s.sum = true, slot.Sum
	}
	p.settle(e)
}

// Acquire implements pool.Slots.
func (p *Pool) Acquire(b *pool.Batch) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := 0; i < b.Hashes.N; i++ {
		b.Slots[i] = pool.Slot{}
		if b.Status[i] = p.admit(b, b.Hashes.At(i)); b.Status[i] == pool.Invalid {
			continue
		}
		b.Status[i] = pool.Missing
		if e := p.visible(b.Space, b.Group, &b.Hashes, i); e != nil {
			e.pins++
			b.Status[i], b.Slots[i] = pool.OK, e.slot(b.Shard)
		}
	}
}

// Release implements pool.Slots. It clears the Ref of each slot, so a second Release does nothing.
func (p *Pool) Release(slots []pool.Slot, status []pool.Status) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range slots {
		e := p.refs[slots[i].Ref]
		slots[i].Ref = 0
		if e == nil || e.pins == 0 {
			continue
		}
		if status[i] == pool.Corrupt && !e.dropped {
			p.drop(e)
			p.stats.Dropped++
		}
		p.unpin(e)
	}
}
