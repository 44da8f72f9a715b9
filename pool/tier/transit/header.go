// Package transit is how values are on their way between memory and the tiers below it: the header
// that a value has in a store, and the staging memory in which it lies.
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
//	16  32      name of the node that wrote it, 0 behind its end
//	48  u64 LE  when it was written, Unix seconds
//	56  u32 LE  0
//	60  u32 LE  checksum of bytes 0 to 59: pool.Sum from the Seed of the key in the store
//
// The first checksum binds the bytes to the block, the second the header to where it lies: a value of another key, or of another epoch of the same space, does
// not verify. Another layout gets another magic; what is not known is a miss.

// Sizes of a header and of its longest node name, bytes.
const (
	HeaderBytes = 64
	MaxNode     = 32
)

var magic = [4]byte{'k', 'v', 'T', '1'}

// What is wrong with a value.
var (
	errHeader  = errors.New("no header of this version, or a damaged one")
	errContent = errors.New("the checksum of the content does not fit")
	errStore   = errors.New("the store says that it is damaged")
)

// Header is what a value says of itself.
type Header struct {
	Length uint32
	Sum    uint32
	Node   string
	When   uint64
}

// Seal writes the header for a value that lies under key in the store.
func (h *Header) Seal(key *pool.Key, p []byte) {
	clear(p[:HeaderBytes])
	copy(p, magic[:])
	binary.LittleEndian.PutUint32(p[4:], h.Length)
	binary.LittleEndian.PutUint32(p[8:], h.Sum)
	p[12] = uint8(copy(p[16:16+MaxNode], h.Node))
	binary.LittleEndian.PutUint64(p[48:], h.When)
	binary.LittleEndian.PutUint32(p[60:], pool.Sum(key.Seed(h.Length), p[:60]))
}

// unseal reads and checks the header of a value that was found under key and should have length bytes behind it.
func unseal(key *pool.Key, p []byte, length uint32) (h Header, err error) {
	h = Header{Length: binary.LittleEndian.Uint32(p[4:]), Sum: binary.LittleEndian.Uint32(p[8:]), When: binary.LittleEndian.Uint64(p[48:])}
	if p[12] > MaxNode || h.Length != length {
		return h, errHeader
	}
	h.Node = string(p[16 : 16+p[12]])
	var again [HeaderBytes]byte // a header is what seal writes, and nothing else
	if h.Seal(key, again[:]); !bytes.Equal(again[:], p[:HeaderBytes]) {
		return h, errHeader
	}
	return h, nil
}

// Verify checks a value: its header against the key in the store, its bytes against the key in memory. It gives the bytes' checksum.
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

// Blame says who wrote a value that its store found damaged, as far as its header came and is whole.
func Blame(stored *pool.Key, value []byte) error {
	h, err := unseal(stored, value, uint32(len(value)-HeaderBytes))
	if err != nil {
		return errStore
	}
	return fmt.Errorf("written by %q: %w", h.Node, errStore)
}
