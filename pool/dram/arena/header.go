package arena

import (
	"hash/crc32"
	"sync/atomic"
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// Header describes a slot in a pool's file, in one cache line. Its last word is 0 while the slot is
// free, and a checksum while it holds a whole shard. So one store changes a free slot to a stored
// one or back. A slot is cleared before it can be given to another entry. An invalid header is a
// free slot.
//
//	0   block hash (32 bytes, zero-padded)
//	32  upper half of the shard<<12 | space: number of its record in the file (uint16)
//	34  group<<4 | lower half of the shard
//	35  length of the block hash
//	36  generation of the space (uint32); the header is stale if its record has another
//	40  bytes of the shard (uint32)
//	44  content checksum (uint32)
//	48  parent: a tag of its key (uint32), its slot+1 (uint32); not in the checksum, the tag
//	    verifies it
//	56  last store or load (uint32), in ticks; not in the checksum
//	60  0, or the checksum of bytes 0 to 47 and of the slot's number
type Header struct {
	Hash       [4]uint64
	space      uint16
	place      uint8
	HashLen    uint8
	Generation uint32
	Length     uint32
	Sum        uint32
	Parent     atomic.Uint64
	Used       atomic.Uint32
	Check      atomic.Uint32
}

const (
	headerFixed = 48 // bytes under the checksum
	spaceBits   = 12 // of Header.space; above them is the upper half of the shard
)

var _ = [1<<spaceBits - MaxSpaces]byte{} // each space has a number

var _ = [1]byte{}[unsafe.Sizeof(Header{})-HeaderBytes]

func (h *Header) fixed() []byte { return (*[headerFixed]byte)(unsafe.Pointer(h))[:] }

// SumOf returns the value of Check for a stored header; never 0.
func (h *Header) SumOf(slot uint32) uint32 {
	var b [4]byte
	le.PutUint32(b[:], slot)
	return max(crc32.Update(crc32.Checksum(h.fixed(), castagnoli), castagnoli, b[:]), 1)
}

// Whole reports whether a slot holds a whole shard.
func (h *Header) Whole(slot uint32) bool {
	check := h.Check.Load()
	return check != 0 && check == h.SumOf(slot)
}

// SetPlace sets the space, by the number of its record, the group and the shard of the block.
func (h *Header) SetPlace(space int, group, shard uint8) {
	h.space, h.place = uint16(space)|uint16(shard>>4)<<spaceBits, group<<4|shard&15
}

// CopyPlace sets them to those of another header.
func (h *Header) CopyPlace(from *Header) { h.space, h.place = from.space, from.place }

// Space returns the number of the space's record in the file.
func (h *Header) Space() int { return int(h.space & (1<<spaceBits - 1)) }

// Group returns the group of the block.
func (h *Header) Group() uint8 { return h.place >> 4 }

// Shard returns the shard of the block.
func (h *Header) Shard() uint8 { return uint8(h.space>>spaceBits)<<4 | h.place&15 }

// ParentOf returns the Parent of a header: the parent's slot, and a tag of its key.
func ParentOf(slot, tag uint32) uint64 { return uint64(slot+1)<<32 | uint64(tag) }

// slabWord returns what a file stores of a slab: its first header, the bytes of its slots, and a
// check of both; 0 if the slab is free.
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

// slabAt returns the offset of a slab's word.
func (f *File) slabAt(n int32) int { return int(f.super.Slabs-f.super.Headers) + int(n)*SlabWordBytes }

// Assign writes that a slab is cut into slots, whose headers are all clear; false if there is no
// memory for them.
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

// Withdraw writes that a slab is free. Its headers are all clear.
func (f *File) Withdraw(n int32) {
	if f != nil {
		f.Touch(func() { word(f.meta, f.slabAt(n)).Store(0) })
	}
}

// Slab returns what the file stores of a slab: its first header, and the bytes of its slots; false
// if it is free or cannot be read.
func (f *File) Slab(n int32) (first, slotBytes uint32, ok bool) {
	var w uint64
	f.Touch(func() { w = word(f.meta, f.slabAt(n)).Load() })
	return readSlabWord(w)
}

// Erase invalidates everything that the file holds.
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

// Header returns the header of a cell.
func (f *File) Header(cell uint32) *Header { return &f.headers[cell] }

// UsableHeaders returns how many headers have memory.
func (f *File) UsableHeaders() int { return f.usable }

// A pool's file, format 2. All numbers are little-endian. Offsets are from the beginning of the
// file, and each area begins on a page of the file system (2 MiB on hugetlbfs). A process that maps
// the arena alone cannot access the other areas.
//
//	arena      the slots, slab after slab
//	headers    64 bytes a slot, those of a slab together; sparse, grows as slabs are used
//	learned    two copies of what the policy learned; sparse
//	spaces     MaxSpaces records of spaceBytes; sparse
//	slabs      8 bytes a slab: the slots it is cut into, and where their headers are
//	superblock the last superBytes of the file
const (
	fileFormat = 2

	superBytes    = 4 << 10
	HeaderBytes   = 64
	spaceBytes    = 20 << 10 // one space: not the largest of 256 shards in 16 groups with a long identity
	MaxSpaces     = 1 << 10  // spaces of a file; entries of further ones end with the process
	SlabWordBytes = 8
	learnedBytes  = pool.MaxLearned + 4<<10 // one copy, its head included
	// Twice the possible slots have headers, so that spans fit between others.
	slotsPerHeader = 2
)

// SlotUnit is the unit to which slots are rounded up, bytes.
const SlotUnit = 1 << 10

// Layout holds the offsets of the areas. It follows from the three sizes.
type Layout struct {
	arena, slab, page                      int64
	Headers, Learned, Spaces, Slabs, Super int64 // offsets
	End                                    int64
}

// LayoutOf returns the layout for the bytes of an arena, of a slab, and of a page.
func LayoutOf(arena, slab, page int64) (l Layout) {
	l.arena, l.slab, l.page = arena, slab, page
	l.Headers = roundUp(arena, page)
	l.Learned = roundUp(l.Headers+l.cells()*HeaderBytes, page)
	l.Spaces = roundUp(l.Learned+2*learnedBytes, page)
	l.Slabs = roundUp(l.Spaces+MaxSpaces*spaceBytes, page)
	l.End = roundUp(l.Slabs+l.SlabCount()*SlabWordBytes+superBytes, page)
	l.Super = l.End - superBytes
	return l
}

func (l *Layout) cells() int64 { return slotsPerHeader * l.arena / SlotUnit }

// SlabCount returns the number of slabs.
func (l *Layout) SlabCount() int64 { return l.arena / l.slab }

// least returns the memory that a file takes before anything is stored in it.
func (l *Layout) least() int64 { return l.Headers + l.End - l.Slabs }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
