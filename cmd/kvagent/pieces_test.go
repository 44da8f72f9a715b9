package main

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// A slot of the pool never lies in two of the pieces that are pinned one by one, whatever its size
// and the pool's.
func TestSlotsLieInOnePiece(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 2))
	t.Logf("seed %d", seed)
	for _, size := range []int64{1 << 20, 300 << 20, 1 << 30, 5<<30 + 12345, 64 << 30, 1 << 40} {
		p, err := dram.Open(dram.Options{Bytes: size, Virtual: true})
		if err != nil {
			t.Fatal(err)
		}
		slab, reserved := p.Info().SlabBytes, 0
		if cuda.DefaultPinPiece%slab != 0 {
			t.Errorf("a pool of %d bytes: slabs of %d bytes, of which no whole number is a piece of %d", size, slab,
				int64(cuda.DefaultPinPiece))
		}
		for range 20 {
			bytes := uint32(1 + rng.Int64N(slab))
			reserved += checkPieces(t, p, bytes, rng.Uint64())
		}
		if reserved == 0 {
			t.Errorf("a pool of %d bytes has no slot at all", size)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// checkPieces reserves some slots of one size, holds them to the pieces, and gives them up again.
func checkPieces(t *testing.T, p *dram.Pool, bytes uint32, salt uint64) (reserved int) {
	t.Helper()
	space, err := p.OpenSpace(pool.Spec{Fingerprint: fingerprint(salt), Shards: 1,
		Groups: []pool.Group{{ShardBytes: []uint32{bytes}}}})
	if err != nil {
		t.Fatal(err)
	}
	const n = 100
	chain := make([]byte, 0, n*8)
	for i := range uint64(n) {
		chain = binary.LittleEndian.AppendUint64(chain, salt+i)
	}
	b := pool.Batch{Space: space, Epoch: p.Epoch(space), Hashes: pool.Chain(chain, 8), Status: make([]pool.Status, n),
		Slots: make([]pool.Slot, n)}
	p.Reserve(&b)
	verdict := make([]pool.Status, 0, n)
	var slots []pool.Slot
	for i, s := range b.Slots {
		if b.Status[i] != pool.OK {
			continue
		}
		slots, verdict = append(slots, s), append(verdict, pool.Missing)
		if first, last := s.Off/cuda.DefaultPinPiece, (s.Off+int64(s.Len)-1)/cuda.DefaultPinPiece; first != last ||
			s.Len != bytes {
			t.Fatalf("a slot of %d bytes at %d lies in the pieces %d to %d", s.Len, s.Off, first, last)
		}
	}
	p.Commit(slots, b.Epoch, verdict)
	return len(slots)
}

func fingerprint(salt uint64) (fp pool.Fingerprint) {
	binary.LittleEndian.PutUint64(fp[:], salt)
	return fp
}
