package transfer

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// TestCombine holds combine to hash/crc32, for pieces of all lengths and any first state.
func TestCombine(t *testing.T) {
	table := crc32.MakeTable(crc32.Castagnoli)
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		bytes := make([]byte, random.IntN(1<<random.IntN(18)))
		for i := range bytes {
			bytes[i] = byte(random.Uint32())
		}
		at, seed := random.IntN(len(bytes)+1), random.Uint32()
		before, after := crc32.Update(seed, table, bytes[:at]), crc32.Update(0, table, bytes[at:])
		got := combine(before, after, shiftOf(uint32(len(bytes)-at)))
		if want := crc32.Update(seed, table, bytes); got != want {
			t.Fatalf("%d and %d bytes: %08x, hash/crc32 says %08x", at, len(bytes)-at, got, want)
		}
	}
}
