package dram

import (
	"bytes"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// TestAnyDamage changes bytes anywhere after the arena and opens the file: the pool must hold its
// invariants, and return a block with the right bytes or not at all.
func TestAnyDamage(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	o := Options{Bytes: 256 << 10, SlabBytes: 16 << 10, Path: shmPath(t)}
	h := randomChain(nil, 1, 200)
	back := 0
	for round := range 60 {
		os.Remove(o.Path)
		p := reopen(t, o)
		put(t, p, openSpec(t, p, keptSpec), h)
		closePool(t, p)
		damage(t, o, rng)
		p, err := Open(o)
		if err != nil {
			continue // its magic: no pool's file any more
		}
		back += countRight(t, p, openSpec(t, p, keptSpec), h)
		put(t, p, 0, h)
		if n := p.Prefix(0, 0, h); n != h.N {
			t.Errorf("round %d: %d of %d blocks after they were stored again", round, n, h.N)
		}
		closePool(t, p)
	}
	if back == 0 {
		t.Error("no block ever came back")
	}
}

// damage writes to the file through a mapping of its own, like a faulty process.
func damage(t *testing.T, o Options, rng *rand.Rand) {
	t.Helper()
	f, err := os.OpenFile(o.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l := arena.LayoutOf(o.Bytes, o.SlabBytes, arena.PageBytes)
	areas := [][2]int64{
		{l.Headers, l.Learned - l.Headers}, {l.Spaces, 256},
		{l.Slabs, l.SlabCount() * arena.SlabWordBytes}, {l.Super, int64(arena.SuperEnd)},
	}
	for range 1 + rng.IntN(20) {
		a := areas[rng.IntN(len(areas))]
		b := make([]byte, 1+rng.IntN(8))
		for i := range b {
			b[i] = byte(rng.Uint32())
		}
		if _, err := f.WriteAt(b, a[0]+rng.Int64N(a[1]-8)); err != nil {
			t.Fatal(err)
		}
	}
}

// countRight counts the blocks of a chain that are there, and fails on one that has wrong bytes.
func countRight(t *testing.T, p *Pool, id pool.SpaceID, h pool.Hashes) (n int) {
	t.Helper()
	b := pool.Batch{Space: id, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
	p.Acquire(&b)
	for i, s := range b.Slots {
		if b.Status[i] != pool.OK {
			continue
		}
		n++
		if !bytes.Equal(p.base[s.Off:][:pool.MaxHashLen], h.At(i)) {
			t.Errorf("block %d has wrong bytes", i)
		}
	}
	p.Release(b.Slots, b.Status)
	return n
}
