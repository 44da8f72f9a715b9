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
//	0   block, under the checksum (48 bytes)
//	48  parent: a tag of its key (uint32), its slot+1 (uint32); the tag verifies it
//	56  last store or load (uint32), in ticks
//	60  0, or the checksum of the block and of the slot's number
type Header struct {
	Block
	Parent atomic.Uint64
	Used   atomic.Uint32
	Check  atomic.Uint32
}

// Block is the part of a header that says what the slot holds.
type Block struct {
	Hash         [4]uint64 // zero-padded
	Space        uint16    // number of its record in the file
	Group, Shard uint8
	HashLen      uint32 // bytes
	Turn         uint32 // of the space; the header is stale if its record has another
	Sum          uint32 // of the content
}

var _ = [1]byte{}[unsafe.Sizeof(Header{})-HeaderBytes]

// SumOf returns the value of Check for a stored header; never 0.
func (h *Header) SumOf(slot uint32) uint32 {
	var b [4]byte
	le.PutUint32(b[:], slot)
	return max(crc32.Update(crc32.Checksum(bytesOf(&h.Block), castagnoli), castagnoli, b[:]), 1)
}

// Whole reports whether a slot holds a whole shard.
func (h *Header) Whole(slot uint32) bool {
	check := h.Check.Load()
	return check != 0 && check == h.SumOf(slot)
}

// ParentOf returns the Parent of a header: the parent's slot, and a tag of its key.
func ParentOf(slot, tag uint32) uint64 { return uint64(slot+1)<<32 | uint64(tag) }

// slabWord returns what a file stores of a slab: the bytes of its slots, and a check of that; 0 if
// the slab is free.
func slabWord(slotBytes uint32) uint64 {
	w := uint64(slotBytes/SlotUnit) << 8
	return w | slabCheck(w)
}

func slabCheck(w uint64) uint64 { return (w>>8*0x9e3779b97f4a7c15>>57)<<1 | 1 }

func (f *File) slabAt(n int32) *atomic.Uint64 {
	return record(f.area(f.layout.Slabs+int64(n)*SlabWordBytes, SlabWordBytes)).word(0)
}

// ProvideHeaders gives memory to the headers of n slots from the first on; false: there is none.
func (f *File) ProvideHeaders(first, n uint32) bool {
	from := int64(first) * HeaderBytes
	return f == nil || f.grow(f.layout.Headers+from, f.layout.Headers+from+int64(n)*HeaderBytes)
}

// Assign writes that a slab is cut into slots, whose headers are clear.
func (f *File) Assign(n int32, slotBytes uint32) {
	if f == nil {
		return
	}
	f.Touch(func() { f.slabAt(n).Store(slabWord(slotBytes)) })
}

// Withdraw writes that a slab is free. Its headers are all clear.
func (f *File) Withdraw(n int32) {
	if f != nil {
		f.Touch(func() { f.slabAt(n).Store(0) })
	}
}

// Slab returns the bytes of a slab's slots; 0 if it is free or cannot be read.
func (f *File) Slab(n int32) (slotBytes uint32) {
	var w uint64
	f.Touch(func() { w = f.slabAt(n).Load() })
	if slotBytes = uint32(w>>8) * SlotUnit; w != slabWord(slotBytes) {
		return 0
	}
	return slotBytes
}

// Header returns the header of a slot. Those of slabs that were never cut have no memory.
func (f *File) Header(slot uint32) *Header { return &f.headers[slot] }

// A pool's file, format 5. All numbers are little-endian. Offsets are from the beginning of the
// file, and each area begins on a page of the file system (2 MiB on hugetlbfs). A process that maps
// the arena alone cannot access the other areas.
//
//	arena      the slots, slab after slab
//	headers    64 bytes a slot, by its number; sparse, grows as slabs are used
//	learned    what the policy learned
//	spaces     MaxSpaces records of spaceBytes; sparse
//	slabs      8 bytes a slab: the slots it is cut into
//	superblock the last superBytes of the file
const (
	fileFormat = 5

	superBytes    = 4 << 10
	HeaderBytes   = 64
	spaceBytes    = 20 << 10 // one space: not the largest of 256 shards in 16 groups
	MaxSpaces     = 1 << 10  // spaces of a file; entries of further ones end with the process
	SlabWordBytes = 8
	learnedBytes  = pool.MaxLearned + 4<<10 // its head included
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
	l.Learned = roundUp(l.Headers+l.slots()*HeaderBytes, page)
	l.Spaces = roundUp(l.Learned+learnedBytes, page)
	l.Slabs = roundUp(l.Spaces+MaxSpaces*spaceBytes, page)
	l.End = roundUp(l.Slabs+l.SlabCount()*SlabWordBytes+superBytes, page)
	l.Super = l.End - superBytes
	return l
}

func (l *Layout) slots() int64 { return l.arena / SlotUnit }

// SlabCount returns the number of slabs.
func (l *Layout) SlabCount() int64 { return l.arena / l.slab }

// least returns the memory that a file takes before anything is stored in it.
func (l *Layout) least() int64 { return l.Headers + l.Spaces - l.Learned + l.End - l.Slabs }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
