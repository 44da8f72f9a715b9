package transfer

import "hash/crc32"

// combine returns the CRC-32C of some bytes and those after them: before is that of the first, in
// whatever state it began, after that of the others alone, and shift is shiftOf their number.
func combine(before, after, shift uint32) uint32 { return multiply(shift, before) ^ after }

// shiftOf returns the polynomial x^(8n) modulo CRC-32C's, with the lowest power in the highest bit,
// as in zlib's crc32_combine.
func shiftOf(n uint32) uint32 {
	power, square := uint32(1)<<31, uint32(1)<<(31-8)
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			power = multiply(power, square)
		}
		square = multiply(square, square)
	}
	return power
}

// multiply returns the product of two such polynomials.
func multiply(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		if a>>31 != 0 {
			product ^= b
		}
		low := b & 1
		b >>= 1
		if low != 0 {
			b ^= crc32.Castagnoli
		}
	}
	return product
}
