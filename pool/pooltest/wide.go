package pooltest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// testManyShards stores entries of up to MaxShards shards, in any order of their shards, next to
// entries of one.
func testManyShards(t *testing.T, open Open) {
	o := Options{Bytes: 4 << 20, SlabBytes: 64 << 10}
	f := start(t, open, o, model("narrow", 1, 1000))
	r := rand.New(rand.NewPCG(1, 2))
	for _, shards := range []int{16, 17, 64, 65, pool.MaxShards} {
		var sizes []uint32
		for range shards {
			sizes = append(sizes, uint32(1+r.IntN(1024)))
		}
		w := f.with(model(fmt.Sprint(shards, " shards"), 1, sizes...))
		f.store(chain(fmt.Sprint("before ", shards), 2), nil)
		w.orders(r, chain(string(w.spec.Identity), 2))
		if _, err := w.ResetSpace(w.space); err != nil { // its entries' numbers go to others
			t.Fatal(err)
		}
		f.check()
		f.store(chain(fmt.Sprint("after ", shards), 4), nil)
	}
	f.empty()
}

// orders stores a chain shard by shard in a random order, gives every third shard up once, and
// checks the status of all shards after each step.
func (f *fixture) orders(r *rand.Rand, h pool.Hashes) {
	f.t.Helper()
	order, stored := r.Perm(f.spec.Shards), make([]bool, f.spec.Shards)
	for n, shard := range order {
		f.wantPrefix(h, 0, "a shard is missing")
		b := f.batch(h, uint8(shard), nil)
		f.Reserve(b)
		f.wantStatus(b, pool.OK, "a shard that is not stored")
		again := f.batch(h, uint8(shard), nil)
		f.Reserve(again)
		f.wantStatus(again, pool.InProgress, "a shard being written")
		if n%3 == 2 {
			f.Commit(b.Slots, b.Epoch, []pool.Status{pool.Busy, pool.Busy})
			b = f.batch(h, uint8(shard), nil)
			f.Reserve(b)
			f.wantStatus(b, pool.OK, "a shard that was given up")
		}
		f.write(b)
		f.Commit(b.Slots, b.Epoch, b.Status)
		stored[shard] = true
		for other, is := range stored {
			if is && (n < 3 || other%16 == n%16) {
				again := f.batch(h, uint8(other), nil)
				f.Reserve(again)
				f.wantStatus(again, pool.Exists, fmt.Sprintf("shard %d after %d of %d shards", other, n+1, len(order)))
			}
		}
		f.check()
	}
	f.wantPrefix(h, h.N, "all shards are committed")
	for shard := range f.spec.Shards {
		b := f.batch(h, uint8(shard), nil)
		f.Acquire(b)
		f.wantStatus(b, pool.OK, "all shards are committed")
		f.verify(b)
		f.Release(b.Slots, b.Status)
	}
}
