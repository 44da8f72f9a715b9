package dram

import (
	"cmp"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// Reserve implements pool.Slots.
func (p *Pool) Reserve(b *pool.Batch) {
	if p.advisor != nil {
		p.advisor.CatchUp()
	}
	r := p.reserve(b, false)
	if r.need > 0 {
		var f func(need int64) bool
		if p.locked(func(c *core) { f = c.pressure }); f != nil && f(r.need) {
			r = p.reserve(b, true)
		}
	}
	if r.need > 0 || r.overs > 0 {
		p.countBusy(b, r.overs)
	}
}

// reservation is a batch being decided. core is used with the lock held, which is released between
// two parts.
type reservation struct {
	*core
	batch  *pool.Batch
	retry  bool // only what was Busy is decided
	next   int  // hash
	id     ident
	bytes  int64  // of an entry
	before uint32 // the entry before the next hash; none if it is not stored
	at     cursor
	full   pool.Status // Busy: nothing more can be evicted; Unwanted: the policy refused a block
	need   int64       // bytes that found no room
	over   bool        // the owner's budget has no room, and none of its entries can be evicted
	overs  int         // blocks refused for that
	own    uint32      // the last entry made, which the next one of the owner is older than
}

// reserve decides a batch, or on a retry what was Busy in it.
func (p *Pool) reserve(b *pool.Batch, retry bool) reservation {
	r := reservation{core: p.core, batch: b, retry: retry}
	for r.next < b.Hashes.N {
		p.reservePart(&r, min(r.next+lockStride, b.Hashes.N))
	}
	return r
}

// reservePart decides hashes up to index to, or up to one for which a slab was taken, or too many
// pinned entries were passed.
func (p *Pool) reservePart(r *reservation, to int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, b := p.core, r.batch
	refusal := r.open()
	c.work.refill()
	if refusal == pool.OK {
		r.before = r.predecessor(r.next)
	}
	for ; r.next < to && c.work.taken == 0; r.next++ {
		i := r.next
		decided := r.retry && b.Status[i] != pool.Busy // what was reserved before stays the caller's
		switch {
		case decided && refusal == pool.OK:
			r.before = c.find(r.id, b.Hashes.At(i))
		case decided:
		case refusal != pool.OK:
			b.Status[i], b.Slots[i] = refusal, pool.Slot{}
		case !r.decide(i):
			return
		}
	}
}

// decide decides one hash; false: it is to be tried again in the next part.
func (r *reservation) decide(i int) bool {
	b := r.batch
	b.Status[i], b.Slots[i] = r.one(b.Hashes.At(i))
	switch {
	case b.Status[i] != pool.Busy:
	case r.work.passed:
		r.full = pool.OK
		return false
	case r.over:
		r.overs++
	default:
		r.need += r.bytes
	}
	return true
}

// open returns why nothing of the batch can be reserved, or OK.
func (r *reservation) open() pool.Status {
	b := r.batch
	id, sp, ok := r.identOf(b.Space, b.Group, b.Hashes.Len)
	if !ok || int(b.Shard) >= sp.spec.Shards {
		return pool.Invalid
	}
	if b.Epoch != sp.epoch {
		return pool.Stale
	}
	r.id, r.bytes = id, sp.groups[b.Group].bytes
	return pool.OK
}

func (r *reservation) predecessor(i int) uint32 {
	switch b := r.batch; {
	case i > 0:
		return r.find(r.id, b.Hashes.At(i-1))
	case len(b.Parent) == b.Hashes.Len:
		return r.find(r.id, b.Parent)
	}
	return none
}

func (r *reservation) one(hash []byte) (pool.Status, pool.Slot) {
	c := r.core
	e := c.find(r.id, hash)
	if e == none && r.full == pool.OK && !r.over {
		if r.over = !c.afford(r.batch.Owner, r.bytes, r.before); !r.over {
			if r.batch.Refusable {
				c.incoming = c.seed.Hash(uint32(r.id), offheap.KeyOf(hash))
			}
			e = c.create(r.id, hash, r.before)
			if c.refused {
				r.full = pool.Unwanted
			} else if e == none {
				r.full = pool.Busy
			}
			c.refused, c.incoming = false, 0
			if e != none && r.batch.Owner != 0 {
				c.owners.own(e, r.batch.Owner, r.bytes, r.own)
				c.recs.All[e].hold |= flagOwned
				r.own = e
			}
		}
	}
	if e == none {
		r.before = none
		return cmp.Or(r.full, pool.Busy), pool.Slot{}
	}
	c.relink(e, r.before)
	c.touch(e, &r.at)
	r.before = e
	return c.reserveShard(e, r.batch.Shard)
}

func (c *core) reserveShard(e uint32, shard uint8) (pool.Status, pool.Slot) {
	slot, _ := c.shardSlot(c.recs.All[e].head, int(shard))
	switch state := c.slabs.state(slot); *state {
	case shardPresent:
		return pool.Exists, pool.Slot{}
	case shardWriting:
		return pool.InProgress, pool.Slot{}
	default:
		*state = shardWriting
	}
	c.leaveLists(e) // it may have been partial
	c.states.All[e].writing++
	return pool.OK, c.slot(e, shard)
}

func (c *core) slot(e uint32, shard uint8) pool.Slot {
	r := &c.recs.All[e]
	sp := c.realms[r.ident.realm()].space
	number, held := c.shardSlot(r.head, int(shard))
	return pool.Slot{
		Ref: c.ref(e), Off: c.slabs.offset(number), Sum: held.sum, Shard: shard,
		Len: sp.spec.Groups[r.ident.group()].ShardBytes[shard],
	}
}

// countBusy counts the refused blocks of a batch, of which over because of the owner's budget.
func (p *Pool) countBusy(b *pool.Batch, over int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	busy := 0
	for _, s := range b.Status[:b.Hashes.N] {
		if s == pool.Busy {
			busy++
		}
	}
	p.core.stats.Busy += uint64(busy - over)
	p.core.owners.refused += uint64(over)
	p.core.owners.owners[b.Owner].refused += uint64(over)
}

// Commit implements pool.Slots. It clears the Ref of each slot, so a second Commit does nothing.
func (p *Pool) Commit(slots []pool.Slot, epoch uint32, status []pool.Status) {
	var at cursor
	p.strides(len(slots), func(c *core, from, to int) {
		c.tick()
		for i := from; i < to; i++ {
			status[i] = c.commit(&slots[i], epoch, status[i], &at)
			slots[i].Ref = 0
		}
		c.announce()
	})
}

func (c *core) commit(s *pool.Slot, epoch uint32, status pool.Status, at *cursor) pool.Status {
	var slot uint32
	var held *slotShard
	e, ok := c.deref(s.Ref)
	if ok {
		slot, held = c.shardSlot(c.recs.All[e].head, int(s.Shard))
		ok = *c.slabs.state(slot) == shardWriting
	}
	if !ok {
		if status == pool.OK {
			return pool.Stale
		}
		return status
	}
	r, l := &c.recs.All[e], &c.states.All[e]
	*c.slabs.state(slot) = shardEmpty
	l.writing--
	m := &c.realms[r.ident.realm()]
	if status == pool.OK && (r.is(flagDropped) || m.over || m.space.epoch != epoch) {
		status = pool.Stale // its epoch, or that in which its bytes were computed, is over
	}
	if status == pool.OK {
		*c.slabs.state(slot) = shardPresent
		l.present++
		held.sum = s.Sum
		c.persistShard(e, slot, s.Shard, s.Sum)
	}
	c.settle(e, at)
	return status
}

// Acquire implements pool.Slots.
func (p *Pool) Acquire(b *pool.Batch) {
	for i := range b.Hashes.N {
		b.Status[i], b.Slots[i] = pool.Invalid, pool.Slot{}
	}
	p.each(b.Space, b.Group, &b.Hashes, func(c *core, sp *space, i int, found []uint32) {
		for j, e := range found {
			b.Status[i+j], b.Slots[i+j] = c.acquire(e, b.Shard, sp, sp.groups[b.Group].bytes)
		}
	})
}

func (c *core) acquire(e uint32, shard uint8, sp *space, bytes int64) (pool.Status, pool.Slot) {
	r := &c.recs.All[e]
	switch {
	case int(shard) >= sp.spec.Shards:
		return pool.Invalid, pool.Slot{}
	case e == none:
		return pool.Missing, pool.Slot{}
	case r.pins() == maxPins:
		return pool.Busy, pool.Slot{}
	case c.owner(r.head) != e: // the slot was given to another entry
		return pool.Corrupt, pool.Slot{}
	}
	alone := r.pins() == 0 || r.is(flagRead)
	c.pin(e, bytes)
	if alone {
		r.hold |= flagRead
	}
	return pool.OK, c.slot(e, shard)
}

// Release implements pool.Slots. It clears the Ref of each slot, so a second Release does nothing.
func (p *Pool) Release(slots []pool.Slot, status []pool.Status) {
	p.strides(len(slots), func(c *core, from, to int) {
		for i := from; i < to; i++ {
			e, ok := c.deref(slots[i].Ref)
			slots[i].Ref = 0
			if !ok || c.recs.All[e].pins() == 0 {
				continue
			}
			if status[i] == pool.Corrupt && !c.recs.All[e].is(flagDropped) {
				c.drop(e, pool.ByCorruption)
				c.stats.Dropped++
			}
			c.unpin(e)
		}
	})
}
