package pooltest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// testSuffixFirst stores chains in several ways, and evicts them block by block.
func testSuffixFirst(t *testing.T, open Open) {
	h := chain("long", 40)
	for name, store := range map[string]func(f *fixture){
		"stored at once": func(f *fixture) { f.store(h, nil) },
		"extended when it is old": func(f *fixture) {
			f.store(h.Slice(0, 20), nil)
			f.store(chain("between", 10), nil)
			f.store(h.Slice(20, 40), h.At(19))
		},
		"with a block that was lost and came again": func(f *fixture) {
			b := f.batch(h, 0, nil)
			f.Reserve(b)
			f.write(b)
			b.Status[10] = pool.Status(19)
			f.Commit(b.Slots, b.Epoch, b.Status)
			f.save(h, 0, nil)
			f.wantPrefix(h, 40, "the lost block came again")
			f.wantPrefix(h.Slice(11, 40), 29, "only what follows it is used")
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, open, small, model("one", 1, 1024))
			store(f)
			for i := range 60 {
				f.store(chain(fmt.Sprint("new", i), 1), nil)
				f.prefixClosed(h)
			}
			if f.count(h) == h.N {
				t.Fatal("nothing of the old chain was evicted")
			}
			f.empty()
		})
	}
}

// testOldChain has two old chains, one extended late: both are evicted whole before newer ones.
func testOldChain(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h, newer := chain("old", 40), chain("newer", 24)
	f.store(h.Slice(0, 20), nil)
	f.store(h.Slice(20, 40), h.At(19))
	f.store(newer, nil)
	for i := range 40 {
		f.store(chain(fmt.Sprint("new", i), 1), nil)
		f.wantCount(newer, 24, "a newer chain goes before an older one is gone")
	}
	f.wantCount(h, 0, "the old chain's prefix outlives its suffix and newer chains")
	f.empty()
}

// testPieces fills the pool with one chain stored in many parts from its beginning, like a long
// prompt; the next part must still find room.
func testPieces(t *testing.T, open Open) {
	const blocks, piece = 4096, 16
	f := start(t, open, Options{Bytes: blocks << 10, SlabBytes: 64 << 10}, model("one", 1, 1024))
	for _, name := range []string{"first", "second"} {
		h := chain(name, blocks)
		for from := 0; from < blocks; from += piece {
			var parent []byte
			if from > 0 {
				parent = h.At(from - 1)
			}
			f.store(h.Slice(from, from+piece), parent)
		}
		f.wantCount(h, blocks, "a chain that came in pieces found no room")
	}
	f.empty()
}

func (f *fixture) wantCount(h pool.Hashes, n int, why string) {
	f.t.Helper()
	if got := f.count(h); got != n {
		f.t.Fatalf("%s: %d of %d blocks are stored, want %d", why, got, h.N, n)
	}
}

func (f *fixture) prefixClosed(h pool.Hashes) {
	f.t.Helper()
	seen := true
	for i, p := range f.present(h) {
		if p && !seen {
			f.t.Fatalf("suffix kept when its prefix goes: block %d is stored, block %d is not", i, i-1)
		}
		seen = p
	}
}

func testOwnPrefix(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	f.save(chain("all at once", 100), 0, nil)
	f.wantPrefix(chain("all at once", 100), 64, "a chain longer than the pool: its first blocks stay")
	h := chain("bit by bit", 100)
	var parent []byte
	for i := 0; i < 70; i += 10 {
		b := f.save(h.Slice(i, i+10), 0, parent)
		parent = h.At(i + 9)
		f.prefixClosed(h)
		if want := map[bool]pool.Status{true: pool.OK, false: pool.Busy}[i < 60]; b.Status[9] != want {
			t.Fatalf("block %d: status %d, want %d: a suffix must not push out its own prefix", i+9, b.Status[9], want)
		}
	}
	f.wantPrefix(h, 64, "a chain longer than the pool: its first blocks stay")
	f.empty()
}

func testLeastRecent(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	for i := range 8 {
		f.store(chain(fmt.Sprint(i), 8), nil)
	}
	used := chain("0", 8)
	f.wantPrefix(used, 8, "stored")
	for i := range 7 {
		f.store(chain(fmt.Sprint("new", i), 8), nil)
		f.wantPrefix(used, 8, "a chain that is used is not the one to go")
	}
	for i := 1; i < 8; i++ {
		if n := f.count(chain(fmt.Sprint(i), 8)); n != 0 {
			t.Fatalf("chain %d was not used and has still %d blocks", i, n)
		}
	}
	f.empty()
}

// testNoHole grows a random tree of chains in a pool that is always full.
func testNoHole(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range 400 {
		h := fork(r)
		n := f.Prefix(f.space, 0, h)
		_, refs, _ := f.Pin(f.space, 0, h, 1<<30, nil)
		var parent []byte
		if n > 0 {
			parent = h.At(n - 1)
		}
		f.save(h.Slice(n, h.N), 0, parent)
		f.Unpin(refs)
		if i%8 == 0 {
			f.check()
		}
		for k := range 12 {
			f.prefixClosed(forkOf(k))
		}
	}
	f.empty()
}

// fork returns a chain that shares its beginning with others: 12 chains that part at 1, 4 and 9
// blocks.
func fork(r *rand.Rand) pool.Hashes {
	h := forkOf(r.IntN(12))
	return h.Slice(0, 1+r.IntN(h.N))
}

func forkOf(k int) pool.Hashes {
	blob := chain("root", 1).Blob
	blob = append(blob, chain(fmt.Sprint("a", k%2), 3).Blob...)
	blob = append(blob, chain(fmt.Sprint("b", k%4), 5).Blob...)
	blob = append(blob, chain(fmt.Sprint("c", k), 20).Blob...)
	return pool.Chain(blob, hashLen)
}

// testCircle names blocks as each other's parents, as a hostile client may.
func testCircle(t *testing.T, open Open) {
	f := start(t, open, small, model("one", 1, 1024))
	h := chain("x", 20)
	f.store(h, nil)
	back := make([]byte, 0, len(h.Blob))
	for i := h.N - 1; i >= 0; i-- {
		back = append(back, h.At(i)...)
	}
	for range 3 {
		f.Prefix(f.space, 0, pool.Chain(back, hashLen))
		f.save(h.Slice(0, 1), 0, h.At(19))
		f.Prefix(f.space, 0, pool.Chain(append(append([]byte(nil), h.Blob...), h.Blob...), hashLen))
		f.check()
	}
	for i := range 200 {
		f.store(chain(fmt.Sprint("new", i), 1), nil)
	}
	if n := f.count(h); n != 0 {
		t.Fatalf("%d blocks that name each other as parents cannot be evicted", n)
	}
	f.empty()
}
