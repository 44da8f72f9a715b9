package arena

import (
	"testing"
	"unsafe"
)

// TestHeaderIsWholeOrFree tries every number of bytes of a header that may have been written when
// the process was killed.
func TestHeaderIsWholeOrFree(t *testing.T) {
	h := Header{Block: Block{
		Hash: [4]uint64{1, 2, 3, 4}, HashLen: 32, Turn: 9, Sum: 77, Space: 3, Group: 1, Shard: 2,
	}}
	h.Parent.Store(5)
	h.Check.Store(h.SumOf(8))
	all := *(*[HeaderBytes]byte)(unsafe.Pointer(&h))
	for n := range HeaderBytes + 1 {
		var written Header
		copy((*[HeaderBytes]byte)(unsafe.Pointer(&written))[:], all[:n&^3]) // words are written in one piece
		if got, want := written.Whole(8), n == HeaderBytes; got != want {
			t.Errorf("%d bytes written: whole %v", n, got)
		}
	}
	for bit := range int(unsafe.Sizeof(Block{})) * 8 {
		flipped := all
		flipped[bit/8] ^= 1 << (bit % 8)
		if (*Header)(unsafe.Pointer(&flipped)).Whole(8) {
			t.Errorf("bit %d flipped, and whole", bit)
		}
	}
	if h.Whole(9) {
		t.Error("whole in another slot")
	}
}
