package dram

import (
	"slices"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// coldest are a pool's blocks that are not held, in the order of eviction, by their first byte.
func coldest(p *Pool) (out []byte) {
	c := p.core
	for e := c.recent.oldest; e != none; e = c.recs.All[e].newer {
		if r := &c.recs.All[e]; !c.held(e) {
			out = append(out, r.hash.Bytes(r.ident.hashLen()).Bytes[0])
		}
	}
	return out
}

// lonely is a batch of one block, whose hash is its number and zeros.
func lonely(id pool.SpaceID, number byte) *pool.Batch {
	h := make([]byte, pool.MaxHashLen)
	h[0] = number
	return &pool.Batch{
		Space: id, Epoch: 1, Hashes: pool.Chain(h, len(h)), Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1),
	}
}

func ok(pool.Slot) pool.Status { return pool.OK }

// Reading a block to write it elsewhere is no use: the order of eviction stays, in memory and in
// the file.
func TestReadWithoutTouchIsNoUse(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	o := Options{Bytes: 64 << 10, SlabBytes: 16 << 10, Path: shmPath(t), Clock: func() time.Time { return now }}
	p := reopen(t, o)
	id := openSpec(t, p, keptSpec)
	var want []byte
	for n := range byte(40) {
		now = now.Add(time.Second)
		put(t, p, id, lonely(id, n).Hashes)
		want = append(want, n)
	}
	now = now.Add(time.Second)
	for _, n := range slices.Concat(want, []byte{20, 19, 39, 0, 21}) {
		b := lonely(id, n)
		if p.ReadWithoutTouch(b, ok); b.Status[0] != pool.OK {
			t.Fatalf("block %d has status %d", n, b.Status[0])
		}
	}
	if got := coldest(p); !slices.Equal(got, want) {
		t.Errorf("in memory they go in the order %v, want %v", got, want)
	}
	closePool(t, p)
	p = reopen(t, o)
	openSpec(t, p, keptSpec)
	if got := coldest(p); !slices.Equal(got, want) {
		t.Errorf("by the file they go in the order %v, want %v", got, want)
	}
	closePool(t, p)
}

// Uses of a block during ReadWithoutTouch count.
func TestUsedDuringReadWithoutTouch(t *testing.T) {
	for name, c := range map[string]struct {
		meanwhile func(p *Pool, b *pool.Batch)
		status    pool.Status
		want      []byte
	}{
		"nothing": {func(*Pool, *pool.Batch) {}, pool.OK, []byte{0, 1, 2, 3, 4}},
		"found":   {func(p *Pool, b *pool.Batch) { p.Prefix(b.Space, 0, b.Hashes) }, pool.OK, []byte{0, 1, 3, 4, 2}},
		"loaded": {func(p *Pool, b *pool.Batch) {
			load := lonely(b.Space, 2)
			p.Acquire(load)
			p.Release(load.Slots, load.Status)
		}, pool.OK, []byte{0, 1, 3, 4, 2}},
		"held, and given back later": {func(p *Pool, b *pool.Batch) {
			load := lonely(b.Space, 2)
			p.Acquire(load)
			b.Slots = append(b.Slots, load.Slots...)
		}, pool.OK, []byte{0, 1, 3, 4, 2}},
		"its neighbours go": {func(p *Pool, b *pool.Batch) { dropAll(p, b.Space, 1, 3) }, pool.OK, []byte{
			0, 2, 4,
		}},
		"the newer one goes": {func(p *Pool, b *pool.Batch) { dropAll(p, b.Space, 3) }, pool.OK, []byte{
			0, 1, 2, 4,
		}},
		"all others go": {func(p *Pool, b *pool.Batch) {
			dropAll(
				p, b.Space, 0, 1, 3, 4,
			)
		}, pool.OK, []byte{2}},
		"it goes itself": {func(p *Pool, b *pool.Batch) { dropAll(p, b.Space, 2) }, pool.OK, []byte{
			0, 1, 3, 4,
		}},
		"it is found to be damaged": {func(*Pool, *pool.Batch) {}, pool.Corrupt, []byte{0, 1, 3, 4}},
		"read without touch by a second one": {func(p *Pool, b *pool.Batch) {
			p.ReadWithoutTouch(
				lonely(b.Space, 1), ok,
			)
		}, pool.OK, []byte{0, 1, 2, 3, 4}},
		"the one after it is loaded": {func(p *Pool, b *pool.Batch) {
			again := lonely(b.Space, 1)
			p.Acquire(again)
			p.Release(again.Slots, again.Status)
		}, pool.OK, []byte{0, 2, 3, 4, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			p := reopen(t, Options{Bytes: 64 << 10, SlabBytes: 16 << 10})
			defer closePool(t, p)
			id := openSpec(t, p, keptSpec)
			for n := range byte(5) {
				put(t, p, id, lonely(id, n).Hashes)
			}
			b := lonely(id, 2)
			p.ReadWithoutTouch(b, func(s pool.Slot) pool.Status {
				if p.base[s.Off] != 2 {
					t.Errorf("the slot has %d", p.base[s.Off])
				}
				c.meanwhile(p, b)
				return c.status
			})
			if len(b.Slots) > 1 {
				p.Release(b.Slots[1:], []pool.Status{pool.OK})
			}
			if got := coldest(p); b.Status[0] != c.status || !slices.Equal(got, c.want) {
				t.Errorf("status %d, they go in the order %v, want %v", b.Status[0], got, c.want)
			}
			if s := p.Stats(); s.Pinned != 0 {
				t.Errorf("%d bytes are pinned", s.Pinned)
			}
		})
	}
	p := reopen(t, Options{Bytes: 64 << 10, SlabBytes: 16 << 10})
	defer closePool(t, p)
	id := openSpec(t, p, keptSpec)
	missing, foreign := lonely(id, 9), lonely(id+1, 9)
	p.ReadWithoutTouch(missing, func(pool.Slot) pool.Status { t.Error("read, and not there"); return pool.OK })
	p.ReadWithoutTouch(foreign, func(pool.Slot) pool.Status { t.Error("read, and no such space"); return pool.OK })
	if missing.Status[0] != pool.Missing || foreign.Status[0] != pool.Invalid {
		t.Errorf("statuses %d and %d", missing.Status[0], foreign.Status[0])
	}
}

// dropAll drops blocks.
func dropAll(p *Pool, id pool.SpaceID, numbers ...byte) {
	for _, n := range numbers {
		b := lonely(id, n)
		p.Acquire(b)
		p.Release(b.Slots, []pool.Status{pool.Corrupt})
	}
}

// TestRefsKeepTheirHighestBitClear reuses a record until its generation wraps: a ref never has the
// bit by which tiers tell their promises.
func TestRefsKeepTheirHighestBitClear(t *testing.T) {
	p := reopen(t, Options{Bytes: 64 << 10, SlabBytes: 16 << 10})
	defer closePool(t, p)
	id := openSpec(t, p, keptSpec)
	p.core.states.All[1].generation = 1<<31 - 3
	for n := range byte(6) {
		b := lonely(id, n)
		put(t, p, id, b.Hashes)
		p.Acquire(b)
		if ref := b.Slots[0].Ref; ref>>63 != 0 || uint32(ref) != 1 || ref>>32 == 0 {
			t.Errorf("ref %x", ref)
		}
		p.Release(b.Slots, []pool.Status{pool.Corrupt})
	}
}
