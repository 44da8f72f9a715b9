package ipc

// nibbles is the value of a lower-case hex digit, 0xff for anything else.
var nibbles = func() (t [256]byte) {
	for i := range t {
		t[i] = 0xff
	}
	for i, c := range []byte("0123456789abcdef") {
		t[c] = byte(i)
	}
	return t
}()

// unhex reads lower-case hex into dst, of half its length; false if src holds anything else.
func unhex(dst, src []byte) bool {
	var bad byte
	for i := range dst {
		hi, lo := nibbles[src[2*i]], nibbles[src[2*i+1]]
		bad |= hi | lo
		dst[i] = hi<<4 | lo&0x0f
	}
	return bad < 0x10
}
