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

// read reads a block as a tier does.
func read(p *Pool, b *pool.Batch) pool.Status {
	p.Acquire(b)
	if b.Status[0] == pool.OK {
		p.Release(b.Slots, []pool.Status{pool.OK})
	}
	return b.Status[0]
}

// Reading a block to write it elsewhere is no use: the order of eviction stays, in memory and in
// the file.
func TestReadingIsNoUse(t *testing.T) {
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
		if status := read(p, lonely(id, n)); status != pool.OK {
			t.Fatalf("block %d has status %d", n, status)
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

// A look-up's pin is a use from its beginning on, in memory and, from its end on, in the file.
func TestPinIsAUse(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	o := Options{Bytes: 64 << 10, SlabBytes: 16 << 10, Path: shmPath(t), Clock: func() time.Time { return now }}
	p := reopen(t, o)
	id := openSpec(t, p, keptSpec)
	for n := range byte(5) {
		now = now.Add(time.Second)
		put(t, p, id, lonely(id, n).Hashes)
	}
	now = now.Add(time.Second)
	_, refs, _ := p.Pin(id, 0, lonely(id, 2).Hashes, 1<<20, nil)
	put(t, p, id, lonely(id, 5).Hashes)
	now = now.Add(time.Second)
	p.Unpin(refs)
	if got, want := coldest(p), []byte{0, 1, 3, 4, 2, 5}; !slices.Equal(got, want) {
		t.Errorf("in memory they go in the order %v, want %v", got, want)
	}
	closePool(t, p)
	p = reopen(t, o)
	openSpec(t, p, keptSpec)
	if got, want := coldest(p), []byte{0, 1, 3, 4, 5, 2}; !slices.Equal(got, want) {
		t.Errorf("by the file they go in the order %v, want %v", got, want)
	}
	closePool(t, p)
}

// TestRefsKeepTheirHighestBitClear reuses a record until its serial wraps: a ref never has the
// bit by which tiers tell their promises.
func TestRefsKeepTheirHighestBitClear(t *testing.T) {
	p := reopen(t, Options{Bytes: 64 << 10, SlabBytes: 16 << 10})
	defer closePool(t, p)
	id := openSpec(t, p, keptSpec)
	p.core.states.All[1].serial = 1<<31 - 3
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
