// Package crc32c computes the CRC-32C of blocks as fast as memory gives them, by itself or while
// they are copied.
package crc32c

import "hash/crc32"

// table is that of the portable form.
var table = crc32.MakeTable(crc32.Castagnoli)

// piece is how many bytes the portable form copies before it sums them: they are still in the
// first-level cache.
const piece = 8 << 10

// Update continues a CRC-32C over the bytes of p, as crc32.Update does with the table of
// crc32.Castagnoli.
func Update(state uint32, p []byte) uint32 {
	if len(p) < fastMin || !fast {
		return crc32.Update(state, table, p)
	}
	return updateFast(state, p)
}

// Copy copies src to dst, of equal length, and continues a CRC-32C over the bytes. The fast forms
// write past the cache (the bytes are not read again soon), so other threads see the copies of a
// batch only after StoreFence.
//
// The sum is of the bytes that were copied, also if src changes meanwhile.
func Copy(dst, src []byte, state uint32) uint32 {
	if len(src) < fastMin || !fast {
		return copyPortable(dst, src, state)
	}
	return copyFast(dst, src, state)
}

// CopiesFast reports whether Copy is faster here than the built-in copy.
func CopiesFast() bool { return fast }

// copyPortable sums dst, not src, so that the sum is of what was copied.
func copyPortable(dst, src []byte, state uint32) uint32 {
	for len(src) > 0 {
		n := copy(dst[:min(len(dst), piece)], src)
		state = crc32.Update(state, table, dst[:n])
		dst, src = dst[n:], src[n:]
	}
	return state
}
