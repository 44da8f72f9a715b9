package pooltest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// Bounds of what storing blocks of one size may cost, in a pool of sizesSlabs slabs.
const (
	sizesSlabs     = 16
	sizesSlabBytes = 64 << 10
	sizesMost      = 2 // bytes evicted for a byte stored, and a slab
)

var sizesOptions = Options{Bytes: sizesSlabs * sizesSlabBytes, SlabBytes: sizesSlabBytes}

// talks are conversations of one model that grow in turn, so that each slab has a part of most of
// them.
type talks struct {
	*fixture
	chains []pool.Hashes
	length []int
	begun  int
}

func (f *fixture) talks(n, longest int) *talks {
	t := &talks{fixture: f, length: make([]int, n), begun: n}
	for i := range n {
		t.chains = append(t.chains, chain(fmt.Sprint(string(f.spec.Identity), i), longest))
	}
	return t
}

// grow adds a block to a conversation, or begins another at its end, and returns the bytes stored:
// those of the block, and of blocks that were evicted meanwhile.
func (t *talks) grow(i int) (bytes int64) {
	if t.length[i]++; t.length[i] > t.chains[i].N {
		t.length[i], t.begun = 1, t.begun+1
		t.chains[i] = chain(fmt.Sprint(string(t.spec.Identity), t.begun), t.chains[i].N)
	}
	h := t.chains[i].Slice(0, t.length[i])
	for n := t.Prefix(t.space, 0, h); n < h.N; n++ {
		if t.count(h.Slice(n, n+1)) > 0 {
			continue // after a hole: a slab was taken
		}
		var parent []byte
		if n > 0 {
			parent = h.At(n - 1)
		}
		t.store(h.Slice(n, n+1), parent)
		bytes += t.slots()
	}
	return bytes
}

// slots returns the bytes of the slots of a block.
func (f *fixture) slots() (n int64) {
	for _, b := range f.spec.Groups[0].ShardBytes {
		n += int64(b+1023) &^ 1023
	}
	return n
}

// stored returns the bytes that are still stored, and checks their content.
func (t *talks) stored() (n int64) {
	t.t.Helper()
	for _, h := range t.chains {
		n += int64(t.count(h)) * t.slots()
		for shard := range t.spec.Shards {
			b := t.batch(h, uint8(shard), nil)
			t.Acquire(b)
			t.verify(b)
			t.Release(b.Slots, b.Status)
		}
	}
	return n
}

// testSecondSize fills the pool with interleaved conversations and stores a little of another
// model, which must cost little.
func testSecondSize(t *testing.T, open Open) {
	for name, second := range map[string][]uint32{
		"larger": {3 << 10}, "smaller": {512}, "of two sizes": {3 << 10, 700},
		"of nearly a slab": {sizesSlabBytes - 4<<10},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, open, sizesOptions, model("first", 1, 2<<10))
			r := rand.New(rand.NewPCG(1, 0))
			const conversations = 64
			first, filled := f.talks(conversations, 64), int64(0)
			for filled < sizesOptions.Bytes {
				filled += first.grow(r.IntN(conversations))
			}
			before := first.stored()
			if before != filled || filled != sizesOptions.Bytes {
				t.Fatalf("%d bytes of %d stored, %d wanted", before, filled, sizesOptions.Bytes)
			}
			g := f.with(model("second", 1, second...))
			other := g.talks(8, 64)
			stored := int64(0)
			for i := 0; stored < sizesSlabBytes/2; i++ {
				stored += other.grow(i % 8)
				f.check()
			}
			evicted := before - first.stored()
			t.Logf("%d bytes stored, %d evicted", stored, evicted)
			if most := sizesMost*stored + sizesSlabBytes; evicted > most {
				t.Errorf("storing %d bytes of another size evicted %d, may evict %d", stored, evicted, most)
			}
			if got := other.stored(); got != stored {
				t.Errorf("%d of %d bytes of the second model are still stored", got, stored)
			}
			if _, err := g.ResetSpace(g.space); err != nil {
				t.Fatal(err)
			}
			f.empty()
		})
	}
}

// Of testManySizes: so many slabs, and models of at most so many sizes.
const (
	manySizesSlabs     = 32
	manySizesSlabBytes = 64 << 10
	manySizesLargest   = 8 << 10 // bytes of a shard
	manySizesModels    = 4
)

// testManySizes stores blocks of random models under a changing load. A pool that was full must on
// average be full, except for a slab of each size and the remainders of slabs, and evictions are
// bounded by what is stored.
func testManySizes(t *testing.T, open Open) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	o := Options{Bytes: manySizesSlabs * manySizesSlabBytes, SlabBytes: manySizesSlabBytes}
	var models []*talks
	f := start(t, open, o, model("empty", 1, 1))
	sizes := int64(0)
	for i := range 2 + r.IntN(manySizesModels-1) {
		var shards []uint32
		for range 1 + r.IntN(2) {
			shards = append(shards, uint32(1+r.IntN(manySizesLargest)))
		}
		sizes += int64(len(shards))
		models = append(models, f.with(model(fmt.Sprint("model ", i), 1, shards...)).talks(32, 24))
	}
	stored, inUse, looks := int64(0), int64(0), int64(0)
	full := o.Bytes - sizes*manySizesSlabBytes - manySizesSlabs*manySizesLargest
	for step := 0; stored < 4*o.Bytes; step++ {
		if r.IntN(512) == 0 {
			r.Shuffle(len(models), func(i, j int) { models[i], models[j] = models[j], models[i] })
		}
		m := models[0]
		if r.IntN(4) == 0 {
			m = models[r.IntN(len(models))]
		}
		stored += m.grow(r.IntN(len(m.chains)))
		if used := f.Stats().Used; looks > 0 || used >= full {
			inUse += used
			looks++
		}
		if step%256 == 0 {
			f.check()
		}
	}
	for _, m := range models {
		m.stored()
	}
	s := f.Stats()
	evicted := stored - s.Used
	average := inUse / max(looks, 1)
	t.Logf("%d models of %d sizes: %d bytes stored, %d evicted; %d of %d used on average",
		len(models), sizes, stored, evicted, average, o.Bytes)
	if average < full {
		t.Errorf("%d bytes of a full pool of %d were in use on average, must be %d: too much was evicted for slabs",
			average, o.Bytes, full)
	}
	if most := sizesMost*stored + manySizesSlabBytes; evicted > most {
		t.Errorf("storing %d bytes of %d sizes evicted %d, may be %d", stored, sizes, evicted, most)
	}
}
