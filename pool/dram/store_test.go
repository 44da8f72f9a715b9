package dram

import (
	"context"
	"testing"

	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// newStore opens spaces in a pool and wraps the pool as a Store, shard by shard. Keys are of these
// spaces, lengths those of their specs.
func newStore(t testing.TB, p *Pool, specs ...pool.Spec) pool.Store {
	t.Helper()
	s := &poolStore{p: p, spaces: map[pool.Fingerprint]openSpace{}}
	for _, spec := range specs {
		id, err := p.OpenSpace(spec)
		if err != nil {
			t.Fatal(err)
		}
		s.spaces[spec.Fingerprint] = openSpace{id, spec}
	}
	return s
}

type poolStore struct {
	p      *Pool
	spaces map[pool.Fingerprint]openSpace
}

type openSpace struct {
	id   pool.SpaceID
	spec pool.Spec
}

func (s *poolStore) Put(ctx context.Context, items []pool.Item) error {
	for i := range items {
		if err := ctx.Err(); err != nil {
			return err
		}
		items[i].Status = s.put(&items[i])
	}
	return nil
}

func (s *poolStore) put(it *pool.Item) pool.Status {
	b, ok := s.batch(&it.Key, len(it.Data))
	if !ok {
		return pool.Invalid
	}
	b.Parent = it.Parent.Bytes[:min(it.Parent.Len, pool.MaxHashLen)]
	s.p.Reserve(&b)
	if b.Status[0] == pool.OK {
		slot := &b.Slots[0]
		if !s.touch(slot, func(mem []byte) { copy(mem, it.Data) }) {
			b.Status[0] = pool.Busy
		}
		slot.Sum = pool.Sum(it.Key.Seed(slot.Len), it.Data)
		s.p.Commit(b.Slots, b.Epoch, b.Status)
	}
	return b.Status[0]
}

func (s *poolStore) Get(ctx context.Context, items []pool.Item) error {
	for i := range items {
		if err := ctx.Err(); err != nil {
			return err
		}
		items[i].Status = s.get(&items[i])
	}
	return nil
}

func (s *poolStore) get(it *pool.Item) pool.Status {
	b, ok := s.batch(&it.Key, len(it.Data))
	if !ok {
		return pool.Invalid
	}
	s.p.Acquire(&b)
	if b.Status[0] != pool.OK {
		return b.Status[0]
	}
	slot := b.Slots[0]
	read := s.touch(&slot, func(mem []byte) { copy(it.Data, mem) })
	if !read || pool.Sum(it.Key.Seed(slot.Len), it.Data) != slot.Sum {
		b.Status[0] = pool.Corrupt
	}
	s.p.Release(b.Slots, b.Status)
	return b.Status[0]
}

// touch passes the memory of a slot to do. It returns false if a page cannot be read or written,
// and then has the pool probe it.
func (s *poolStore) touch(slot *pool.Slot, do func(mem []byte)) bool {
	mem := s.p.base[slot.Off : slot.Off+int64(slot.Len)]
	if pagefault.Guard(s.p.base, nil, func() { do(mem) }) == nil {
		return true
	}
	s.p.Probe(*slot)
	return false
}

// Exists sets OK or Missing.
func (s *poolStore) Exists(ctx context.Context, keys []pool.Key, status []pool.Status) error {
	return s.each(ctx, keys, func(i int, b *pool.Batch) {
		var there [1]bool
		s.p.Exists(b.Space, b.Group, b.Hashes, there[:])
		status[i] = pool.Missing
		if there[0] {
			status[i] = pool.OK
		}
	}, func(i int) { status[i] = pool.Invalid })
}

// Delete drops whole entries, with all their shards.
func (s *poolStore) Delete(ctx context.Context, keys []pool.Key) error {
	return s.each(ctx, keys, func(_ int, b *pool.Batch) {
		if s.p.Acquire(b); b.Status[0] == pool.OK {
			b.Status[0] = pool.Corrupt // a pool drops what its reader reports as corrupt
			s.p.Release(b.Slots, b.Status)
		}
	}, func(int) {})
}

func (s *poolStore) each(
	ctx context.Context, keys []pool.Key, do func(i int, b *pool.Batch), invalid func(i int),
) error {
	for i := range keys {
		if err := ctx.Err(); err != nil {
			return err
		}
		if b, ok := s.batch(&keys[i], anyLength); ok {
			do(i, &b)
		} else {
			invalid(i)
		}
	}
	return nil
}

const anyLength = -1

// batch returns the batch of one key, if its space is open and length is that of the shard.
func (s *poolStore) batch(k *pool.Key, length int) (b pool.Batch, ok bool) {
	space, ok := s.spaces[k.Space]
	epoch := s.p.Epoch(space.id)
	if !ok || epoch == 0 || k.Hash.Len < 1 || k.Hash.Len > pool.MaxHashLen {
		return b, false
	}
	if int(k.Group) >= len(space.spec.Groups) || int(k.Shard) >= space.spec.Shards {
		return b, false
	}
	if length != anyLength && length != int(space.spec.Groups[k.Group].ShardBytes[k.Shard]) {
		return b, false
	}
	n := int(k.Hash.Len)
	return pool.Batch{
		Space: space.id, Group: k.Group, Shard: k.Shard, Epoch: epoch,
		Hashes: pool.Chain(k.Hash.Bytes[:n], n), Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1),
	}, true
}

// Usage counts entries as items.
func (s *poolStore) Usage() pool.Usage {
	st := s.p.Stats()
	return pool.Usage{Bytes: st.Used, Capacity: st.Capacity, Items: st.Entries}
}

func TestStore(t *testing.T) {
	pooltest.TestStore(t, func(t testing.TB, specs ...pool.Spec) pool.Store {
		p, err := Open(Options{Bytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		return newStore(t, p, specs...)
	})
}
