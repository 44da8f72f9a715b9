package mockengine

import (
	"crypto/sha256"
	"encoding/binary"
)

// Hash is a block hash: SHA-256 over the parent's hash and the block's tokens, so it certifies the whole prefix.
type Hash [sha256.Size]byte

// placeholder is what a token reads as that the scheduler counts but does not know yet. A hash made over one
// names bytes that nobody can ever ask for, or worse: that are not what they say.
const placeholder = ^uint32(0)

// promptTokens writes the n tokens that stand for a trace's hash id.
func promptTokens(dst []uint32, id uint64) {
	x := mix(id + 1)
	for i := range dst {
		dst[i] = uint32(mix(x+uint64(i)) >> 33)
	}
}

// outputTokens writes the answer's tokens from index from on; they depend on the request alone, so a request
// that is run again says the same.
func outputTokens(dst []uint32, request uint64, from int) {
	x := mix(^request)
	for i := range dst {
		dst[i] = uint32(mix(x+uint64(from+i)) >> 33)
	}
}

// hasher chains block hashes; it holds the scratch of one goroutine.
type hasher struct{ buf []byte }

func (h *hasher) next(parent *Hash, tokens []uint32) Hash {
	h.buf = append(h.buf[:0], parent[:]...)
	for _, t := range tokens {
		h.buf = binary.LittleEndian.AppendUint32(h.buf, t)
	}
	return sha256.Sum256(h.buf)
}

// mix is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
