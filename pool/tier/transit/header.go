// Package transit holds what values are made of between memory and the tiers below it: the header
// that a value has in a store, and the staging memory in which it is copied.
package transit

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/pool"
)

// A value in a store is a header and the bytes of the shard:
//
//	 0  magic "kvT1"
//	 4  u32 LE  bytes of the shard
//	 8  u32 LE  checksum of the shard: pool.Sum from the Seed of its key in memory
//	12  u8      bytes of the node's name; 13 to 15: 0
//	16  32      name of the node that wrote it, padded with 0
//	48  u64 LE  when it was written, Unix seconds
//	56  u32 LE  0
//	60  u32 LE  checksum of bytes 0 to 59: pool.Sum from the Seed of the key in the store
//
// The first checksum binds the bytes to the block, the second one binds the header to its key: a
// value of another key, or of another epoch of the same space, does not verify. Another layout gets
// another magic; an unknown magic is a miss.

// Sizes in bytes: of a header, and of the longest node name in it.
const (
	HeaderBytes = 64
	MaxNode     = 32
)

var magic = [4]byte{'k', 'v', 'T', '1'}

// Reasons why a value is rejected.
var (
	errHeader  = errors.New("the header is damaged or of another version")
	errContent = errors.New("the content does not match its checksum")
	errStore   = errors.New("the store reports it as damaged")
)

// Header is the decoded header of a value.
type Header struct {
	Length uint32
	Sum    uint32
	Node   string
	When   uint64
}

// Seal writes the header of a value to be stored under key.
func (h *Header) Seal(key *pool.Key, p []byte) {
	clear(p[:HeaderBytes])
	copy(p, magic[:])
	binary.LittleEndian.PutUint32(p[4:], h.Length)
	binary.LittleEndian.PutUint32(p[8:], h.Sum)
	p[12] = uint8(copy(p[16:16+MaxNode], h.Node))
	binary.LittleEndian.PutUint64(p[48:], h.When)
	binary.LittleEndian.PutUint32(p[60:], pool.Sum(key.Seed(h.Length), p[:60]))
}

// unseal decodes and verifies the header of a value found under key, whose shard should have length
// bytes.
func unseal(key *pool.Key, p []byte, length uint32) (h Header, err error) {
	h = Header{Length: binary.LittleEndian.Uint32(p[4:]), Sum: binary.LittleEndian.Uint32(p[8:]),
		When: binary.LittleEndian.Uint64(p[48:])}
	if p[12] > MaxNode || h.Length != length {
		return h, errHeader
	}
	h.Node = string(p[16 : 16+p[12]])
	var again [HeaderBytes]byte // a valid header is exactly what Seal writes
	if h.Seal(key, again[:]); !bytes.Equal(again[:], p[:HeaderBytes]) {
		return h, errHeader
	}
	return h, nil
}

// Verify checks a value: its header against the key in the store, and its bytes against the key in
// memory. It returns the checksum of the bytes.
func Verify(stored, own *pool.Key, value []byte) (sum uint32, err error) {
	length := uint32(len(value) - HeaderBytes)
	h, err := unseal(stored, value, length)
	if err != nil {
		return 0, err
	}
	if sum = pool.Sum(own.Seed(length), value[HeaderBytes:]); sum != h.Sum {
		return 0, fmt.Errorf("written by %q: %w", h.Node, errContent)
	}
	return sum, nil
}

// DamageError returns the error for a value that its store found damaged. It names the writer if
// the header is intact.
func DamageError(stored *pool.Key, value []byte) error {
	h, err := unseal(stored, value, uint32(len(value)-HeaderBytes))
	if err != nil {
		return errStore
	}
	return fmt.Errorf("written by %q: %w", h.Node, errStore)
}
