package dram

import (
	"testing"
	"unsafe"
)

// TestHeaderIsWholeOrFree tries every number of bytes of a header that may have been written when the process was killed.
func TestHeaderIsWholeOrFree(t *testing.T) {
	h := header{hash: [4]uint64{1, 2, 3, 4}, space: 3, hashLen: 32, place: 0x12, generation: 9, length: 4096, sum: 77}
	h.parent.Store(5)
	h.check.Store(h.sumOf(8))
	all := *(*[headerBytes]byte)(unsafe.Pointer(&h))
	for n := range headerBytes + 1 {
		var written header
		copy((*[headerBytes]byte)(unsafe.Pointer(&written))[:], all[:n&^3]) // words are written in one piece
		if got, want := written.whole(8), n == headerBytes; got != want {
			t.Errorf("%d bytes written: whole %v", n, got)
		}
	}
	for bit := range headerFixed * 8 {
		flipped := all
		flipped[bit/8] ^= 1 << (bit % 8)
		if (*header)(unsafe.Pointer(&flipped)).whole(8) {
			t.Errorf("bit %d flipped, and whole", bit)
		}
	}
	if h.whole(9) {
		t.Error("whole in another slot")
	}
}
