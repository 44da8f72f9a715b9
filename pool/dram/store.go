package dram

import (
	"context"

	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
)

// Store is the pool seen shard by shard. The spaces of its keys must be open, and lengths those of the space.
func (p *Pool) Store() pool.Store { return store{p} }

type store struct{ p *Pool }

func (s store) Put(ctx context.Context, items []pool.Item) error {
	for i := range items {
		if err := ctx.Err(); err != nil {
			return err
		}
		items[i].Status = s.p.put(&items[i])
	}
	return nil
}

func (p *Pool) put(it *pool.Item) pool.Status {
	b, ok := p.batch(&it.Key, len(it.Data))
	if !ok {
		return pool.Invalid
	}
	b.Parent = it.Parent.Bytes[:min(it.Parent.Len, pool.MaxHashLen)]
	p.Reserve(&b)
	if b.Status[0] == pool.OK {
		s := &b.Slots[0]
		to := p.arena.base[s.Off : s.Off+int64(s.Len)]
		if err := pagefault.Guard(p.arena.base, nil, func() { copy(to, it.Data) }); err != nil {
			p.Probe(*s)
			b.Status[0] = pool.Busy
		}
		s.Sum = pool.Sum(it.Key.Seed(s.Len), it.Data)
		p.Commit(b.Slots, b.Epoch, b.Status)
	}
	return b.Status[0]
}

func (s store) Get(ctx context.Context, items []pool.Item) error {
	for i := range items {
		if err := ctx.Err(); err != nil {
			return err
		}
		items[i].Status = s.p.get(&items[i])
	}
	return nil
}

func (p *Pool) get(it *pool.Item) pool.Status {
	b, ok := p.batch(&it.Key, len(it.Data))
	if !ok {
		return pool.Invalid
	}
	p.Acquire(&b)
	if b.Status[0] != pool.OK {
		return b.Status[0]
	}
	s := b.Slots[0]
	err := pagefault.Guard(p.arena.base, nil, func() { copy(it.Data, p.arena.base[s.Off:s.Off+int64(s.Len)]) })
	if err != nil {
		p.Probe(s)
	}
	if err != nil || pool.Sum(it.Key.Seed(s.Len), it.Data) != s.Sum {
		b.Status[0] = pool.Corrupt
	}
	p.Release(b.Slots, b.Status)
	return b.Status[0]
}

// Exists says OK or Missing.
func (s store) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	return s.p.each(ctx, keys, status, func(*core, uint32) {})
}

// Delete drops whole entries: the shards of one go together.
func (s store) Delete(ctx context.Context, keys []pool.Key) error {
	return s.p.each(ctx, keys, make([]pool.Status, len(keys)), func(c *core, e uint32) {
		c.drop(e)
		c.stats.Dropped++
	})
}

func (p *Pool) each(ctx context.Context, keys []pool.Key, status []pool.Status, f func(c *core, e uint32)) error {
	for i := range keys {
		if err := ctx.Err(); err != nil {
			return err
		}
		b, ok := p.batch(&keys[i], anyLength)
		if !ok {
			status[i] = pool.Invalid
			continue
		}
		p.mu.Lock()
		status[i] = p.core.withEntry(&b, f)
		p.mu.Unlock()
	}
	return nil
}

func (c *core) withEntry(b *pool.Batch, f func(c *core, e uint32)) pool.Status {
	id, _, ok := c.identOf(b.Space, b.Group, b.Hashes.Len)
	if !ok {
		return pool.Invalid
	}
	e := c.find(id, b.Hashes.At(0))
	if e == none || !c.recs.all[e].is(flagVisible) {
		return pool.Missing
	}
	f(c, e)
	return pool.OK
}

const anyLength = -1

// batch is the batch of one key, if its space is open and length is that of the shard.
func (p *Pool) batch(k *pool.Key, length int) (b pool.Batch, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id, ok := p.core.byPrint[k.Space]
	if !ok || k.Hash.Len < 1 || k.Hash.Len > pool.MaxHashLen {
		return b, false
	}
	s := p.core.spaces[id]
	if int(k.Group) >= len(s.spec.Groups) || int(k.Shard) >= s.spec.Shards {
		return b, false
	}
	if length != anyLength && length != int(s.spec.Groups[k.Group].ShardBytes[k.Shard]) {
		return b, false
	}
	n := int(k.Hash.Len)
	return pool.Batch{
		Space: id, Group: k.Group, Shard: k.Shard, Epoch: s.epoch,
		Hashes: pool.Chain(k.Hash.Bytes[:n], n), Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1),
	}, true
}

// Usage counts entries as items.
func (s store) Usage() pool.Usage {
	st := s.p.Stats()
	return pool.Usage{Bytes: st.Used, Capacity: st.Capacity, Items: st.Entries}
}
