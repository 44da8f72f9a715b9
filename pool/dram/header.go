package dram

import (
	"hash/crc32"
	"sync/atomic"
	"unsafe"
)

// header is what a pool's file says of a slot: one cache line. Its last word is 0 while the slot is free, and the checksum
// of what stands before it while it holds a whole shard, so that one store makes a free slot a stored one, and one store
// makes it free again. A slot is cleared before it can be given to another, and what is in neither state is free.
//
//	0   block hash (32 bytes, zero behind its length)
//	32  space (uint16): number of its record in the file
//	34  group<<4 | shard
//	35  length of the block hash
//	36  generation of the space (uint32): another one than its record's is over
//	40  bytes of the shard (uint32)
//	44  content checksum (uint32)
//	48  block before this one: a tag of its key (uint32), its slot+1 (uint32); outside the checksum, the tag proves it
//	56  when it was stored or loaded last (uint32), in ticks; outside the checksum
//	60  0, or the checksum of bytes 0 to 47 and of the slot's number
type header struct {
	hash       [4]uint64
	space      uint16
	place      uint8
	hashLen    uint8
	generation uint32
	length     uint32
	sum        uint32
	parent     atomic.Uint64
	used       atomic.Uint32
	check      atomic.Uint32
}

const headerFixed = 48 // bytes under the checksum

var _ = [1]byte{}[unsafe.Sizeof(header{})-headerBytes]

func (h *header) fixed() []byte { return (*[headerFixed]byte)(unsafe.Pointer(h))[:] }

// sumOf is what check is of a stored header; never 0.
func (h *header) sumOf(slot uint32) uint32 {
	var b [4]byte
	le.PutUint32(b[:], slot)
	return max(crc32.Update(crc32.Checksum(h.fixed(), castagnoli), castagnoli, b[:]), 1)
}

// whole says whether a slot holds a whole shard.
func (h *header) whole(slot uint32) bool {
	check := h.check.Load()
	return check != 0 && check == h.sumOf(slot)
}

func (h *header) group() uint8 { return h.place >> 4 }
func (h *header) shard() uint8 { return h.place & 15 }

// parentOf is what a header says of the block before: its slot, and a tag of its key.
func parentOf(slot, tag uint32) uint64 { return uint64(slot+1)<<32 | uint64(tag) }

// slabWord is what a file says of a slab: the first of its headers, the bytes of its slots, and a check of both; 0 if it
// is not in use.
func slabWord(first, slotBytes uint32) uint64 {
	w := uint64(first)<<32 | uint64(slotBytes/slotUnit)<<8
	return w | slabCheck(w)
}

func slabCheck(w uint64) uint64 { return (w>>8*0x9e3779b97f4a7c15>>57)<<1 | 1 }

func readSlabWord(w uint64) (first, slotBytes uint32, ok bool) {
	if w == 0 || w&0xff != slabCheck(w) {
		return 0, 0, false
	}
	return uint32(w >> 32), uint32(w) >> 8 * slotUnit, true
}

// slabAt is where the word of a slab is.
func (f *file) slabAt(n int32) int { return int(f.super.slabs-f.super.headers) + int(n)*slabWordBytes }

// assign notes that a slab is cut into slots, whose headers are all clear; false if there is no room for them.
func (f *file) assign(n int32, first, perSlab, slotBytes uint32) bool {
	if f == nil {
		return true
	}
	if !f.grow(int(first + perSlab)) {
		return false
	}
	f.touch(func() { word(f.meta, f.slabAt(n)).Store(slabWord(first, slotBytes)) })
	return true
}

// withdraw notes that a slab has no slots any more. All its headers are clear.
func (f *file) withdraw(n int32) {
	if f != nil {
		f.touch(func() { word(f.meta, f.slabAt(n)).Store(0) })
	}
}

// slab is what the file says of a slab: the first of its headers, and the bytes of its slots; false if it is not in use, or cannot
// be read.
func (f *file) slab(n int32) (first, slotBytes uint32, ok bool) {
	var w uint64
	f.touch(func() { w = word(f.meta, f.slabAt(n)).Load() })
	return readSlabWord(w)
}

// erase makes nothing of what the file holds count any more.
func (f *file) erase() {
	for n := range f.super.slabCount() {
		f.withdraw(int32(n))
	}
	for n := range f.spacesUsed() {
		f.touch(func() { f.spaceAt(n).remove() })
	}
	for from := 0; from < f.usable*headerBytes; from += smallPage {
		f.touch(func() { clear(f.meta[from:min(from+smallPage, f.usable*headerBytes)]) })
	}
}

// header is that of a cell.
func (f *file) header(cell uint32) *header { return &f.headers[cell] }

// usableHeaders is how many headers have memory.
func (f *file) usableHeaders() int { return f.usable }
