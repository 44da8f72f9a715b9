// Package offheap holds memory off the Go heap: an array that grows in place, and a hash table of
// numbered entries, with the hash of its keys.
package offheap

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

const (
	pageBytes = 4 << 10
	hugeBytes = 2 << 20
	// hugeFrom is the size from which a table asks for huge pages; below it, rounding would cost
	// more than the table itself.
	hugeFrom = 32 << 20
)

// Region is an array of T off the Go heap. Only its pages that were touched take memory, so it
// never moves and is never scanned.
type Region[T any] struct {
	All  []T
	raw  []byte
	huge int // bytes that have huge pages
}

// Map maps n elements, all zero.
func Map[T any](n int) (r Region[T], err error) {
	length := (n*int(unsafe.Sizeof(*new(T))) + hugeBytes - 1) &^ (hugeBytes - 1)
	r.raw, err = unix.Mmap(-1, 0, length, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return r, fmt.Errorf("dram: map %d bytes: %w", length, err)
	}
	_ = unix.Madvise(r.raw, unix.MADV_NOHUGEPAGE) // only advice: huge pages would take more memory
	r.All = unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(r.raw))), n)
	return r, nil
}

// Use says that the first n elements are in use: if these are many, they get huge pages.
func (r *Region[T]) Use(n int) {
	used := n * int(unsafe.Sizeof(*new(T)))
	if used < hugeFrom || used <= r.huge {
		return
	}
	to := min((max(used, r.huge+r.huge/4)+hugeBytes-1)&^(hugeBytes-1), len(r.raw))
	// This is only advice: the region works without huge pages, but is slower.
	_ = unix.Madvise(r.raw[:to], unix.MADV_HUGEPAGE)
	if r.huge == 0 {
		_ = unix.Madvise(r.raw[:used&^(hugeBytes-1)], unix.MADV_COLLAPSE)
	}
	r.huge = to
}

// Close unmaps the memory.
func (r *Region[T]) Close() error {
	if r.raw == nil {
		return nil
	}
	raw := r.raw
	*r = Region[T]{}
	return unix.Munmap(raw)
}

// Seed keys the hash of a table. Block hashes come from the engine: they may be as short as a
// byte, and an engine may be hostile. So their bits are mixed with secret numbers of this process.
type Seed [5]uint64

// NewSeed returns a secret seed, or for a number other than 0 always the same one.
func NewSeed(number uint64) (s Seed) {
	next := rand.Uint64 // the runtime seeds it from the kernel
	if number != 0 {
		next = rand.New(rand.NewPCG(number, 0)).Uint64
	}
	for i := range s {
		s[i] = next() | 1
	}
	return s
}

// Key is a block hash as a record keeps it, zero-padded. It is a struct, not an array, so that it
// stays in registers.
type Key struct{ A, B, C, D uint64 }

// Hash multiplies halves of the key, as wyhash does. id is the rest of what is hashed.
func (s *Seed) Hash(id uint32, k Key) uint64 {
	return fold(fold(k.A^s[0], k.B^s[1])^uint64(id), fold(k.C^s[2], k.D^s[3])^s[4])
}

func fold(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// KeyOf returns a block hash of at most pool.MaxHashLen bytes as a key.
func KeyOf(b []byte) Key {
	if len(b) != pool.MaxHashLen {
		var w [pool.MaxHashLen]byte
		copy(w[:], b)
		return KeyOf(w[:])
	}
	w := (*[pool.MaxHashLen]byte)(b)
	return Key{
		binary.LittleEndian.Uint64(w[0:8]), binary.LittleEndian.Uint64(w[8:16]),
		binary.LittleEndian.Uint64(w[16:24]), binary.LittleEndian.Uint64(w[24:32]),
	}
}

// Tag returns a short hash of the key. It detects a slot that was given to another key; it need not
// resist attackers, because the file is the agent's own and only the order of eviction depends on
// it.
func (k *Key) Tag() uint32 {
	w := k.Words()
	return uint32(pool.MarkWords(&w))
}

// Words returns the key as a header stores it.
func (k *Key) Words() [4]uint64 { return [4]uint64{k.A, k.B, k.C, k.D} }

// KeyOfWords is the reverse of Words.
func KeyOfWords(w *[4]uint64) Key { return Key{w[0], w[1], w[2], w[3]} }

// Bytes returns the hash of a key, of n bytes.
func (k *Key) Bytes(n uint8) (h pool.Hash) {
	for i, w := range [...]uint64{k.A, k.B, k.C, k.D} {
		binary.LittleEndian.PutUint64(h.Bytes[8*i:], w)
	}
	h.Len = n
	return h
}
