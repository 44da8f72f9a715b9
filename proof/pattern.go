package proof

import (
	"bytes"
	"encoding/binary"
)

// pattern fills p with bytes that differ for other seeds and other places.
func pattern(p []byte, seed uint64) {
	for i := 0; i+8 <= len(p); i += 8 {
		v := (uint64(i)>>3 + seed*0xd6e8feb86659fd93 + 1) * 0x9e3779b97f4a7c15
		binary.LittleEndian.PutUint64(p[i:], v^v>>29)
	}
}

// wrong counts the bytes of p that differ from the pattern.
func wrong(p []byte, seed uint64) (n int64) {
	want := make([]byte, len(p))
	pattern(want, seed)
	if bytes.Equal(p, want) {
		return 0
	}
	for i := range p {
		if p[i] != want[i] {
			n++
		}
	}
	return n
}

// words counts the words of 4 bytes of p that equal w.
func words(p []byte, w uint32) (n int64) {
	for i := 0; i+4 <= len(p); i += 4 {
		if binary.LittleEndian.Uint32(p[i:]) == w {
			n++
		}
	}
	return n
}
