package dram

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"

	"github.com/kvagent/kvagent/pool"
)

// seed keys the hash of the table. Block hashes come from the engine: they may be as short as a
// byte, and an engine may be hostile. So their bits are mixed with secret numbers of this process.
type seed [5]uint64

// newSeed returns a secret seed, or for a number other than 0 always the same one.
func newSeed(number uint64) (s seed) {
	next := rand.Uint64 // the runtime seeds it from the kernel
	if number != 0 {
		next = rand.New(rand.NewPCG(number, 0)).Uint64
	}
	for i := range s {
		s[i] = next() | 1
	}
	return s
}

// key is a block hash as a record keeps it, zero-padded. It is a struct, not an array, so that it
// stays in registers.
type key struct{ a, b, c, d uint64 }

// hash multiplies halves of the key, as wyhash does.
func (s *seed) hash(id ident, k key) uint64 {
	return fold(fold(k.a^s[0], k.b^s[1])^uint64(id), fold(k.c^s[2], k.d^s[3])^s[4])
}

func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

func words(b []byte) key {
	if len(b) != pool.MaxHashLen {
		return padded(b)
	}
	w := (*[pool.MaxHashLen]byte)(b)
	return key{
		binary.LittleEndian.Uint64(w[0:8]), binary.LittleEndian.Uint64(w[8:16]),
		binary.LittleEndian.Uint64(w[16:24]), binary.LittleEndian.Uint64(w[24:32]),
	}
}

func padded(b []byte) key {
	var w [pool.MaxHashLen]byte
	copy(w[:], b)
	return words(w[:])
}

// view is a chain of block hashes with its strides computed.
type view struct {
	blob   []byte
	stride int
	n      int // bytes of a hash
}

func viewOf(h *pool.Hashes) view {
	step := max(h.Step, 1)
	return view{blob: h.Blob[h.First*h.Len:], stride: step * h.Len, n: h.Len}
}

// words returns hash i.
func (v *view) words(i int) key {
	at := i * v.stride
	return words(v.blob[at : at+v.n])
}

// tag returns a short hash of the key. It detects a slot that was given to another key; it need not
// resist attackers, because the file is the agent's own and only the order of eviction depends on
// it.
func (k *key) tag() uint32 {
	w := k.words()
	return uint32(pool.MarkWords(&w))
}

// words returns the key as a header stores it.
func (k *key) words() [4]uint64 { return [4]uint64{k.a, k.b, k.c, k.d} }

func keyOf(w *[4]uint64) key { return key{w[0], w[1], w[2], w[3]} }
