package ipc

import "encoding/binary"

// The part of msgpack (github.com/msgpack/msgpack/blob/master/spec.md) that the protocol uses, in
// its shortest encoding. The readers refuse every other encoding, so that a value that was read is
// written as the same bytes.

const (
	mpArray  = 0x90 // to 0x9f
	mpStr    = 0xa0 // to 0xbf
	mpBin8   = 0xc4
	mpBin16  = 0xc5
	mpBin32  = 0xc6
	mpUint8  = 0xcc
	mpUint16 = 0xcd
	mpUint32 = 0xce
	mpUint64 = 0xcf
	mpInt8   = 0xd0
	mpInt64  = 0xd3
	mpStr8   = 0xd9
	mpStr16  = 0xda
	mpStr32  = 0xdb
	mpArr16  = 0xdc
	mpArr32  = 0xdd
)

func appendUint(dst []byte, v uint64) []byte {
	switch {
	case v < 0x80:
		return append(dst, byte(v))
	case v <= 0xff:
		return append(dst, mpUint8, byte(v))
	case v <= 0xffff:
		return binary.BigEndian.AppendUint16(append(dst, mpUint16), uint16(v))
	case v <= 0xffffffff:
		return binary.BigEndian.AppendUint32(append(dst, mpUint32), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(dst, mpUint64), v)
}

// header is how the length before an array, a str or a bin is written: in the first byte, or in the
// 1, 2 or 4 bytes after it.
type header struct {
	first, mask  byte // of a length in the first byte; a mask of 0: there is no such form
	h8, h16, h32 byte // h8 is 0 if there is no such form
}

var (
	arrayHeader = header{mpArray, 0x0f, 0, mpArr16, mpArr32}
	strHeader   = header{mpStr, 0x1f, mpStr8, mpStr16, mpStr32}
	binHeader   = header{0, 0, mpBin8, mpBin16, mpBin32}
)

func (h *header) append(dst []byte, n int) []byte {
	switch {
	case n <= int(h.mask) && h.mask != 0:
		return append(dst, h.first|byte(n))
	case n <= 0xff && h.h8 != 0:
		return append(dst, h.h8, byte(n))
	case n <= 0xffff:
		return binary.BigEndian.AppendUint16(append(dst, h.h16), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(dst, h.h32), uint32(n))
}

// read reads a length, in its shortest form unless loose is set.
func (h *header) read(b []byte, loose bool) (v uint64, n int) {
	if len(b) == 0 {
		return 0, cutShort
	}
	var size int
	var least uint64
	switch c := b[0]; {
	case h.mask != 0 && c&^h.mask == h.first:
		return uint64(c & h.mask), 1
	case c == h.h8 && h.h8 != 0:
		size = 1
		if h.mask != 0 {
			least = uint64(h.mask) + 1
		}
	case c == h.h16:
		size, least = 2, 0x100
		if h.h8 == 0 {
			least = uint64(h.mask) + 1
		}
	case c == h.h32:
		size, least = 4, 0x10000
	default:
		return 0, wrongType
	}
	if loose {
		least = 0
	}
	return bigEndian(b, size, least)
}

func appendArray(dst []byte, n int) []byte  { return arrayHeader.append(dst, n) }
func appendStr(dst []byte, s string) []byte { return append(strHeader.append(dst, len(s)), s...) }
func appendBin(dst, b []byte) []byte        { return append(binHeader.append(dst, len(b)), b...) }

// Results of the readers if b does not begin with the shortest encoding of the expected type.
const (
	wrongType = -1 // something else, or not the shortest form
	cutShort  = -2 // b ends within
)

// bigEndian reads the size bytes after the first of b. Their value must be at least least, because
// a smaller one has a shorter encoding. n is the bytes read, or wrongType or cutShort.
func bigEndian(b []byte, size int, least uint64) (v uint64, n int) {
	if len(b) < 1+size {
		return 0, cutShort
	}
	for _, c := range b[1 : 1+size] {
		v = v<<8 | uint64(c)
	}
	if v < least {
		return 0, wrongType
	}
	return v, 1 + size
}

func readUint(b []byte) (v uint64, n int) {
	if len(b) == 0 {
		return 0, cutShort
	}
	switch c := b[0]; c {
	case mpUint8:
		return bigEndian(b, 1, 0x80)
	case mpUint16:
		return bigEndian(b, 2, 0x100)
	case mpUint32:
		return bigEndian(b, 4, 0x10000)
	case mpUint64:
		return bigEndian(b, 8, 0x100000000)
	default:
		if c < 0x80 {
			return uint64(c), 1
		}
	}
	return 0, wrongType
}

// hexPairs maps two lower-case hex digits, as a little-endian number, to their byte, and everything
// else to 0xffff. One load per byte is two to three times as fast as one per digit or as arithmetic
// on eight at a time, and only the 3 KiB of the table that hold digits are ever accessed.
var hexPairs = func() (t [1 << 16]uint16) {
	for i := range t {
		t[i] = 0xffff
	}
	const digits = "0123456789abcdef"
	for v := range 256 {
		t[int(digits[v>>4])|int(digits[v&15])<<8] = uint16(v)
	}
	return t
}()

// unhex reads lower-case hex into dst, which has half its length; it returns false if src holds
// anything else. It handles four bytes at a time, whose loads are independent.
func unhex(dst, src []byte) bool {
	bad := uint16(0)
	for ; len(dst) >= 4 && len(src) >= 8; dst, src = dst[4:], src[8:] {
		w := binary.LittleEndian.Uint64(src)
		a, b, c, d := hexPairs[uint16(w)], hexPairs[uint16(w>>16)], hexPairs[uint16(w>>32)], hexPairs[w>>48]
		bad |= a | b | c | d
		binary.LittleEndian.PutUint32(dst, uint32(a&0xff)|uint32(b&0xff)<<8|uint32(c&0xff)<<16|uint32(d)<<24)
	}
	for i := range dst {
		v := hexPairs[binary.LittleEndian.Uint16(src[2*i:])]
		bad |= v
		dst[i] = byte(v)
	}
	return bad <= 0xff
}
