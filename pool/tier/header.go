package tier

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
const (
	headerBytes = 64
	maxNode     = 32
)

var errNoMarker = errors.New("the store took no marker of a reset, or gave none back")

var magic = [4]byte{'k', 'v', 'T', '1'}

// What is wrong with a value.
var (
	errHeader  = errors.New("no header of this version, or a damaged one")
	errContent = errors.New("the checksum of the content does not fit")
	errStore   = errors.New("the store says that it is damaged")
)

// header is what a value says of itself.
type header struct {
	length uint32
	sum    uint32
	node   string
	when   uint64
}

// seal writes the header for a value that lies under key in the store.
func (h *header) seal(key *pool.Key, p []byte) {
	clear(p[:headerBytes])
	copy(p, magic[:])
	binary.LittleEndian.PutUint32(p[4:], h.length)
	binary.LittleEndian.PutUint32(p[8:], h.sum)
	p[12] = uint8(copy(p[16:16+maxNode], h.node))
	binary.LittleEndian.PutUint64(p[48:], h.when)
	binary.LittleEndian.PutUint32(p[60:], pool.Sum(key.Seed(h.length), p[:60]))
}

// unseal reads and checks the header of a value that was found under key and should have length bytes behind it.
func unseal(key *pool.Key, p []byte, length uint32) (h header, err error) {
	h = header{length: binary.LittleEndian.Uint32(p[4:]), sum: binary.LittleEndian.Uint32(p[8:]), when: binary.LittleEndian.Uint64(p[48:])}
	if p[12] > maxNode || h.length != length {
		return h, errHeader
	}
	h.node = string(p[16 : 16+p[12]])
	var again [headerBytes]byte // a header is what seal writes, and nothing else
	if h.seal(key, again[:]); !bytes.Equal(again[:], p[:headerBytes]) {
		return h, errHeader
	}
	return h, nil
}

// verify checks a value: its header against the key in the store, its bytes against the key in memory. It gives the bytes' checksum.
func verify(stored, own *pool.Key, value []byte) (sum uint32, err error) {
	length := uint32(len(value) - headerBytes)
	h, err := unseal(stored, value, length)
	if err != nil {
		return 0, err
	}
	if sum = pool.Sum(own.Seed(length), value[headerBytes:]); sum != h.sum {
		return 0, fmt.Errorf("written by %q: %w", h.node, errContent)
	}
	return sum, nil
}

// blame says who wrote a value that its store found damaged, as far as its header came and is whole.
func blame(stored *pool.Key, value []byte) error {
	h, err := unseal(stored, value, uint32(len(value)-headerBytes))
	if err != nil {
		return errStore
	}
	return fmt.Errorf("written by %q: %w", h.node, errStore)
}
