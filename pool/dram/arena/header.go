package arena

import (
	"hash/crc32"
	"sync/atomic"
	"unsafe"
)

// Header is what a pool's file says of a slot: one cache line. Its last word is 0 while the slot is
// free, and the checksum of what stands before it while it holds a whole shard, so that one store
// makes a free slot a stored one, and one store makes it free again. A slot is cleared before it
// can be given to another, and what is in neither state is free.
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
type Header struct {
	Hash       [4]uint64
	Space      uint16
	Place      uint8
	HashLen    uint8
	Generation uint32
	Length     uint32
	Sum        uint32
	Parent     atomic.Uint64
	Used       atomic.Uint32
	Check      atomic.Uint32
}

const headerFixed = 48 // bytes under the checksum

var _ = [1]byte{}[unsafe.Sizeof(Header{})-HeaderBytes]

func (h *Header) fixed() []byte { return (*[headerFixed]byte)(unsafe.Pointer(h))[:] }

// SumOf is what check is of a stored header; never 0.
func (h *Header) SumOf(slot uint32) uint32 {
	var b [4]byte
	le.PutUint32(b[:], slot)
	return max(crc32.Update(crc32.Checksum(h.fixed(), castagnoli), castagnoli, b[:]), 1)
}

// Whole says whether a slot holds a whole shard.
func (h *Header) Whole(slot uint32) bool {
	check := h.Check.Load()
	return check != 0 && check == h.SumOf(slot)
}

// Group of the block.
func (h *Header) Group() uint8 { return h.Place >> 4 }

// Shard of the block.
func (h *Header) Shard() uint8 { return h.Place & 15 }

// ParentOf is what a header says of the block before: its slot, and a tag of its key.
func ParentOf(slot, tag uint32) uint64 { return uint64(slot+1)<<32 | uint64(tag) }

// slabWord is what a file says of a slab: the first of its headers, the bytes of its slots, and a
// check of both; 0 if it is not in use.
func slabWord(first, slotBytes uint32) uint64 {
	w := uint64(first)<<32 | uint64(slotBytes/SlotUnit)<<8
	return w | slabCheck(w)
}

func slabCheck(w uint64) uint64 { return (w>>8*0x9e3779b97f4a7c15>>57)<<1 | 1 }

func readSlabWord(w uint64) (first, slotBytes uint32, ok bool) {
	if w == 0 || w&0xff != slabCheck(w) {
		return 0, 0, false
	}
	return uint32(w >> 32), uint32(w) >> 8 * SlotUnit, true
}

// slabAt is where the word of a slab is.
func (f *File) slabAt(n int32) int { return int(f.super.Slabs-f.super.Headers) + int(n)*SlabWordBytes }

// Assign notes that a slab is cut into slots, whose headers are all clear; false if there is no
// room for them.
func (f *File) Assign(n int32, first, perSlab, slotBytes uint32) bool {
	if f == nil {
		return true
	}
	if !f.grow(int(first + perSlab)) {
		return false
	}
	f.Touch(func() { word(f.meta, f.slabAt(n)).Store(slabWord(first, slotBytes)) })
	return true
}

// Withdraw notes that a slab has no slots any more. All its headers are clear.
func (f *File) Withdraw(n int32) {
	if f != nil {
		f.Touch(func() { word(f.meta, f.slabAt(n)).Store(0) })
	}
}

// Slab is what the file says of a slab: the first of its headers, and the bytes of its slots; false
// if it is not in use, or cannot be read.
func (f *File) Slab(n int32) (first, slotBytes uint32, ok bool) {
	var w uint64
	f.Touch(func() { w = word(f.meta, f.slabAt(n)).Load() })
	return readSlabWord(w)
}

// Erase makes nothing of what the file holds count any more.
func (f *File) Erase() {
	for n := range f.super.SlabCount() {
		f.Withdraw(int32(n))
	}
	for n := range f.SpacesUsed() {
		f.Touch(func() { f.SpaceAt(n).Remove() })
	}
	for from := 0; from < f.usable*HeaderBytes; from += PageBytes {
		f.Touch(func() { clear(f.meta[from:min(from+PageBytes, f.usable*HeaderBytes)]) })
	}
}

// Header is that of a cell.
func (f *File) Header(cell uint32) *Header { return &f.headers[cell] }

// UsableHeaders is how many headers have memory.
func (f *File) UsableHeaders() int { return f.usable }
