package arena

import (
	"testing"
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// TestHeaderIsWholeOrFree tries every number of bytes of a header that may have been written when
// the process was killed.
func TestHeaderIsWholeOrFree(t *testing.T) {
	h := Header{Hash: [4]uint64{1, 2, 3, 4}, HashLen: 32, Generation: 9, Length: 4096, Sum: 77}
	h.SetPlace(3, 1, 2)
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
	for bit := range headerFixed * 8 {
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

// TestPlaceOfAHeader holds the place of shards below 16 to the form that it had when there were no
// others, and reads back every space, group and shard.
func TestPlaceOfAHeader(t *testing.T) {
	var h Header
	h.SetPlace(0x3ff, 15, 14)
	if got := *(*[3]byte)(unsafe.Pointer(&h.space)); got != [3]byte{0xff, 0x03, 0xfe} {
		t.Errorf("space 0x3ff, group 15, shard 14: bytes %x", got)
	}
	for _, space := range []int{0, 1, 255, MaxSpaces - 1} {
		for group := range uint8(pool.MaxGroups) {
			for shard := range pool.MaxShards {
				h.SetPlace(space, group, uint8(shard))
				if h.Space() != space || h.Group() != group || int(h.Shard()) != shard {
					t.Fatalf("space %d, group %d, shard %d: %d, %d, %d", space, group, shard, h.Space(), h.Group(),
						h.Shard())
				}
			}
		}
	}
}
