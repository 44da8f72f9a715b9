package tier

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// install copies verified shards into memory and pins the entry there. It returns nil if the entry
// is no longer wanted, its epoch is over, memory has no room, or the entry is being written
// already.
func (p *Pool) install(f *incoming, sums []uint32) (held []pool.Slot) {
	p.mu.Lock()
	wanted := f.open() && f.wanted()
	p.mu.Unlock()
	if !wanted || f.sp.now.Load() != f.era {
		return nil
	}
	b := pool.Batch{
		Space:  f.key.space,
		Group:  f.key.group,
		Epoch:  f.era.epoch,
		Parent: f.parent.Bytes[:f.parent.Len],
		Hashes: pool.Chain(f.key.hash.Bytes[:f.key.hash.Len], int(f.key.hash.Len)),
		Status: make([]pool.Status, 1),
		Slots:  make([]pool.Slot, 1),
	}
	if !p.fill(f, sums, &b) {
		return nil
	}
	b.Shard = 0
	p.callTestHook()
	p.Memory.Acquire(&b)
	if b.Status[0] != pool.OK {
		return nil
	}
	return b.Slots
}

// fill reserves, writes and commits all shards of an entry, or none.
func (p *Pool) fill(f *incoming, sums []uint32, b *pool.Batch) bool {
	slots, status := make([]pool.Slot, 0, len(sums)), make([]pool.Status, 0, len(sums))
	whole := true
	for shard := range sums {
		b.Shard = uint8(shard)
		p.Memory.Reserve(b)
		if b.Status[0] == pool.Exists {
			continue // it was saved meanwhile
		}
		if b.Status[0] != pool.OK {
			whole = false
			break
		}
		s := b.Slots[0]
		whole = p.reach(s, func(b []byte) { copy(b, f.items[shard].Data[transit.HeaderBytes:]) })
		s.Sum = sums[shard]
		slots, status = append(slots, s), append(status, pool.OK)
		if !whole {
			break
		}
	}
	for i := range status {
		if !whole {
			status[i] = pool.Busy
		}
	}
	p.Memory.Commit(slots, f.era.epoch, status)
	for _, s := range status {
		whole = whole && s == pool.OK
	}
	return whole
}

// settleInstalled ends a promise whose entry was installed, and hands the pin in memory to its
// refs. It offers the entry to the nearer tiers that write on save.
func (p *Pool) settleInstalled(pr *promise, from *level, held []pool.Slot) {
	p.mu.Lock()
	if pr.open() && pr.pins > 0 {
		pr.held, held = held, nil
	}
	calls := p.settleLocked(pr, installed, nil)
	if pr.era == pr.sp.now.Load() {
		for _, l := range p.levels[:from.number] {
			if l.Write == OnSave {
				l.offerLocked(origin{key: pr.key, parent: pr.parent, era: pr.era, sp: pr.sp})
			}
		}
	}
	p.mu.Unlock()
	p.release(held)
	run(calls)
}
