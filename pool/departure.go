package pool

import (
	"encoding/binary"
	"math/bits"
)

// Cause is why an entry left memory.
type Cause uint8

// The causes.
const (
	ByEviction   Cause = iota + 1 // to make room
	ByBudget                      // to keep the budget of its owner
	ByAge                         // it lacked shards for too long
	ByReset                       // of its space
	ByTime                        // the time that its request gave was over, and nothing had used it
	ByCorruption                  // its bytes did not verify
	ByBadPage                     // its memory cannot be read any more
)

// Departure is an entry that left memory.
type Departure struct {
	Space Fingerprint
	Block uint64 // Mark of its hash
	Group uint8
	Cause Cause
	Class string // of the eviction policy; empty: it had none
}

// Mark returns 64 bits that stand for a block hash where there is no room for more. It mixes all of
// the hash, and does not resist who chooses hashes.
func Mark(hash []byte) uint64 {
	h := MakeHash(hash)
	var words [4]uint64
	for i := range words {
		words[i] = binary.LittleEndian.Uint64(h.Bytes[8*i:])
	}
	return MarkWords(&words)
}

// MarkWords is Mark of a zero-padded hash in little-endian words.
func MarkWords(w *[4]uint64) uint64 {
	const a, b, c, d = 0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb, 0xd6e8feb86659fd93
	hi, lo := bits.Mul64(w[0]^a, w[1]^b)
	hi2, lo2 := bits.Mul64(w[2]^c, w[3]^d)
	return hi ^ lo ^ hi2 ^ lo2
}
