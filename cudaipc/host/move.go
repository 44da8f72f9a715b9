package host

import (
	"hash/crc32"

	"github.com/kvagent/kvagent/cudaipc"
)

// movePiece is how many bytes the portable form copies before it sums them: they are still in the
// first-level cache.
const movePiece = 8 << 10

// move copies src to dst, of equal length, and continues a CRC-32C over the bytes: it returns
// crc32.Update(state, castagnoli, src). The fast forms write past the cache (the bytes are not
// read again soon), so other threads see the copies of a batch only after storeFence.
//
// The sum is of the bytes that were copied, also if src changes meanwhile.
func move(dst, src []byte, state uint32) uint32 {
	if len(src) < moveMin || !fastMove {
		return movePortable(dst, src, state)
	}
	return moveFast(dst, src, state)
}

// movePortable sums dst, not src, so that the sum is of what was copied.
func movePortable(dst, src []byte, state uint32) uint32 {
	for len(src) > 0 {
		n := copy(dst[:min(len(dst), movePiece)], src)
		state = crc32.Update(state, cudaipc.Castagnoli, dst[:n])
		dst, src = dst[n:], src[n:]
	}
	return state
}
