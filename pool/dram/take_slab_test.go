package dram

import (
	"bytes"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/evict"
)

// twoSlabs is a pool of two slabs, full of a model's entries of 1 KiB.
func twoSlabs(t *testing.T) (*Pool, pool.Hashes) {
	p, err := Open(Options{Bytes: 64 << 10, SlabBytes: 32 << 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	if _, err := p.OpenSpace(pool.Spec{Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{1024}}}}); err != nil {
		t.Fatal(err)
	}
	var blob []byte
	for i := range byte(64) {
		blob = append(blob, i)
	}
	h := pool.Chain(blob, 1)
	for i := range h.N { // no chain: each may go alone
		if got := reserve(p, 0, h.Slice(i, i+1)); got[0] != pool.OK {
			t.Fatalf("entry %d: status %d", i, got[0])
		}
	}
	return p, h
}

// reserve reserves and commits without writing.
func reserve(p *Pool, space pool.SpaceID, h pool.Hashes) []pool.Status {
	b := pool.Batch{Space: space, Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
	p.Reserve(&b)
	p.Commit(b.Slots, 1, b.Status)
	return b.Status
}

func check(t *testing.T, p *Pool) {
	t.Helper()
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
}

// TestHalfTakenEntryKeepsItsSlab stores an entry whose second slot finds no room: the slab of its
// first slot, which no entry owns yet, must not be taken for it.
func TestHalfTakenEntryKeepsItsSlab(t *testing.T) {
	p, h := twoSlabs(t)
	wide, err := p.OpenSpace(pool.Spec{
		Fingerprint: pool.Fingerprint{1}, Shards: 2, Groups: []pool.Group{{ShardBytes: []uint32{9000, 5000}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	n, refs, _ := p.Pin(0, 0, h.Slice(32, 63), 1<<30, nil) // the second slab, all but one
	if n != 31 {
		t.Fatal("not stored")
	}
	ended := make(chan []pool.Status, 1)
	go func() { ended <- reserve(p, wide, pool.Chain([]byte{200}, 1)) }()
	select {
	case got := <-ended:
		if got[0] != pool.Busy {
			t.Fatalf("status %d, want Busy: one slab is pinned, the other is too small for both shards", got[0])
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a reservation hangs")
	}
	check(t, p)
	p.Unpin(refs)
	if got := reserve(p, wide, pool.Chain([]byte{201}, 1)); got[0] != pool.OK {
		t.Fatalf("status %d with nothing pinned, want OK", got[0])
	}
	check(t, p)
}

// TestSlabWithAPinIsNotTaken pins one entry in each slab: no slab can go to another class, and
// nothing is evicted in vain.
func TestSlabWithAPinIsNotTaken(t *testing.T) {
	p, h := twoSlabs(t)
	other, err := p.OpenSpace(
		pool.Spec{Fingerprint: pool.Fingerprint{1}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{5000}}}},
	)
	if err != nil {
		t.Fatal(err)
	}
	_, refs, _ := p.Pin(0, 0, h.Slice(5, 6), 1<<30, nil)
	_, refs, _ = p.Pin(0, 0, h.Slice(40, 41), 1<<30, refs)
	if got := reserve(p, other, pool.Chain([]byte{200}, 1)); got[0] != pool.Busy {
		t.Fatalf("status %d, want Busy", got[0])
	}
	if s := p.Stats(); s.Entries != 64 || s.Evicted != 0 {
		t.Fatalf("%d entries left, %d evicted, and no slab came of it", s.Entries, s.Evicted)
	}
	p.Unpin(refs[1:])
	if got := reserve(p, other, pool.Chain([]byte{200}, 1)); got[0] != pool.OK {
		t.Fatalf("status %d with a slab free of pins, want OK", got[0])
	}
	if s := p.Stats(); s.Entries != 33 || s.Reassigned != 1 || p.Prefix(0, 0, h.Slice(5, 6)) != 1 {
		t.Fatalf("%+v, want the pinned entry's slab untouched", s)
	}
	check(t, p)
	p.Unpin(refs[:1])
}

// sizedSpaces are a pool of 64 slabs, and models whose blocks have these sizes.
func sizedSpaces(t *testing.T, sizes ...uint32) (p *Pool, spaces []pool.SpaceID) {
	t.Helper()
	p, err := Open(Options{
		Bytes: 16 << 20, SlabBytes: 256 << 10, Virtual: true, Advisor: asAdvisor(evict.NewLRU(), nil),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	for i, n := range sizes {
		id, err := p.OpenSpace(pool.Spec{
			Fingerprint: pool.Fingerprint{byte(i + 1)}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{n}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		spaces = append(spaces, id)
	}
	return p, spaces
}

// TestSteadyLoadLeavesSlabs stores blocks of two sizes at random, with equal bytes on average:
// slabs seldom change their class.
func TestSteadyLoadLeavesSlabs(t *testing.T) {
	p, spaces := sizedSpaces(t, 1<<10, 2<<10)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r, turn := rand.New(rand.NewPCG(seed, 0)), 0
	play := func(bytes int) {
		for stored := 0; stored < bytes; stored += 8 << 10 {
			model := r.IntN(2)
			reserve(p, spaces[model], randomChain(nil, turn, 8>>model))
			turn++
		}
	}
	play(64 << 20)
	before := p.Stats()
	play(256 << 20)
	after := p.Stats()
	slabs := after.Reassigned - before.Reassigned
	t.Logf("%d slabs went to the other size for 256 MiB stored", slabs)
	if slabs > 400 {
		t.Errorf("%d slabs went to and fro while 1024 were stored", slabs)
	}
	check(t, p)
}

// TestSlabWithABadPageIsNotTaken stores a block as large as a slab in a pool full of small ones:
// another slab than those with a bad page, which hold the least, is emptied.
func TestSlabWithABadPageIsNotTaken(t *testing.T) {
	const slab, perSlab, slabs = 16 << 10, 16, 16
	for _, c := range []struct{ bad, gone int }{{1, 0}, {4, 0}, {4, 6}, {7, 6}} {
		p, err := Open(Options{Bytes: slabs * slab, SlabBytes: slab, HugePages: Off})
		if err != nil {
			t.Fatal(err)
		}
		small := pool.Spec{
			Fingerprint: pool.Fingerprint{1}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{1000}}},
		}
		big := pool.Spec{
			Fingerprint: pool.Fingerprint{2}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{slab}}},
		}
		a, b := openSpec(t, p, small), openSpec(t, p, big)
		h := randomChain(nil, 1, slabs*perSlab)
		reserve(p, a, h)
		for i := range c.bad {
			p.retire(int64(i) * slab)
		}
		var keys []pool.Key
		for i := range slabs * c.gone { // of each slab as many
			at := i/c.gone*perSlab + 8 + i%c.gone
			keys = append(keys, pool.Key{Space: small.Fingerprint, Hash: pool.MakeHash(h.At(at))})
		}
		if err := newStore(t, p, small).Delete(t.Context(), keys); err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			before := p.Stats().Evicted
			got := reserve(p, b, randomChain(nil, 100+i, 1))
			if evicted := p.Stats().Evicted - before; got[0] != pool.OK || evicted > perSlab {
				t.Errorf("%d slabs with a bad page, block %d: status %d, %d evicted", c.bad, i, got[0], evicted)
			}
		}
		closePool(t, p)
	}
}

// TestSlabsTakenBesideReaders stores blocks of three sizes while others read, with each byte
// compared.
func TestSlabsTakenBesideReaders(t *testing.T) {
	p, err := Open(Options{Bytes: 512 << 10, SlabBytes: 16 << 10})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var spaces []pool.SpaceID
	for i, n := range []uint32{1000, 3000, 5000} {
		spaces = append(spaces, openSpec(t, p, pool.Spec{
			Fingerprint: pool.Fingerprint{byte(i + 1)}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{n}}},
		}))
	}
	var all sync.WaitGroup
	for w := range 4 {
		all.Go(func() {
			for turn := range 300 {
				id, h := spaces[turn/50%3], randomChain(nil, 1+w*1000+turn%40, 12)
				n := p.Prefix(id, 0, h)
				storeFilled(p, id, h.Slice(n, h.N))
				b := batchOf(id, h)
				p.Acquire(b)
				for i, s := range b.Slots {
					if b.Status[i] == pool.OK && !bytes.Equal(p.base[s.Off:][:s.Len], filling(h.At(i), int(s.Len))) {
						t.Errorf("wrong bytes in block %d of chain %d of worker %d", i, turn, w)
					}
				}
				p.Release(b.Slots, b.Status)
			}
		})
	}
	all.Wait()
	check(t, p)
	if p.Stats().Reassigned == 0 {
		t.Error("no slab was taken")
	}
}

func batchOf(id pool.SpaceID, h pool.Hashes) *pool.Batch {
	return &pool.Batch{
		Space: id, Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
}

// storeFilled stores blocks that are filled with their hashes.
func storeFilled(p *Pool, id pool.SpaceID, h pool.Hashes) {
	b := batchOf(id, h)
	p.Reserve(b)
	for i, s := range b.Slots {
		if b.Status[i] == pool.OK {
			copy(p.base[s.Off:][:s.Len], filling(h.At(i), int(s.Len)))
		}
	}
	p.Commit(b.Slots, 1, b.Status)
}

// filling is so many bytes that repeat a hash.
func filling(hash []byte, n int) []byte { return bytes.Repeat(hash, n/len(hash)+1)[:n] }
