// Package slab cuts an arena into slots of the sizes that blocks need, and keeps slots off pages
// that cannot be read.
package slab

import (
	"errors"
	"math/bits"
	"slices"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// The arena is cut into slabs of equal size. A slab is free or belongs to a class, which cuts it
// into slots of one size. A slot's number is slab<<slotBits | place in the slab.

// Cell describes a used slot. The slots of an entry are linked from that of shard 0 on; the last
// one's link is the entry, with upward set. The link of a free slot is the next free one of its
// slab, +1.
type Cell struct{ Link, Sum uint32 }

// State is that of the shard for which a slot was taken.
type State uint8

// States of a shard.
const (
	Empty State = iota
	Writing
	Present
)

type slab struct {
	class      int32  // NoClass: free
	last       int32  // class it had before
	headers    uint32 // slots that have one with memory in the file
	fresh      uint32 // slots from here on have never been used
	used       uint32
	bad        bool   // retired: no slot is allocated
	free       uint32 // first free slot below fresh, +1
	next, prev int32  // slabs of the class that have room, NoSlab at the ends
}

// NoClass and NoSlab are none.
const (
	NoClass = int32(-1)
	NoSlab  = int32(-1)
)

type class struct {
	bytes   uint32 // of a slot
	perSlab uint32
	room    int32 // first slab with a free slot
	slabs   int
	used    int
	retired int // free slots of its retired slabs
}

// Slabs are the slabs of an arena. Its methods are called with the pool's lock held.
type Slabs struct {
	slab     []slab
	class    []class
	byBytes  map[uint32]int32
	cells    offheap.Region[Cell]  // by slot
	states   offheap.Region[State] // by slot
	unused   []int32
	file     *arena.File // nil: the pool ends with the process
	bytes    int64       // of a slab
	slotBits uint
	inUseBuf []bool
	used     int64  // bytes of slots in use
	moved    uint64 // slabs that went to another class
	bad      badMemory
}

// New cuts an arena into slabs. page is the size of its pages in bytes; f may be nil.
func New(bytes, slabBytes, page int64, f *arena.File) (s Slabs, err error) {
	n := int(bytes / slabBytes)
	s = Slabs{
		slab: make([]slab, n), byBytes: map[uint32]int32{}, bytes: slabBytes,
		slotBits: uint(bits.TrailingZeros64(uint64(slabBytes / arena.SlotUnit))),
		bad:      badMemory{page: page, pages: map[int64]struct{}{}}, file: f,
	}
	for i := n - 1; i >= 0; i-- {
		s.slab[i] = slab{class: NoClass, last: NoClass}
		s.unused = append(s.unused, int32(i)) // the first is used first, as it is populated first
	}
	if s.cells, err = offheap.Map[Cell](n << s.slotBits); err == nil {
		s.states, err = offheap.Map[State](n << s.slotBits)
	}
	return s, err
}

// ClassOf returns the class for shards of n bytes, and makes it if necessary.
func (s *Slabs) ClassOf(n uint32) int32 {
	size := (n + arena.SlotUnit - 1) &^ (arena.SlotUnit - 1)
	id, ok := s.byBytes[size]
	if !ok {
		id = int32(len(s.class))
		s.class = append(s.class, class{bytes: size, perSlab: uint32(s.bytes / int64(size)), room: NoSlab})
		s.byBytes[size] = id
	}
	return id
}

// Take allocates a slot of a class; false if the class has none and no slab is free.
func (s *Slabs) Take(id int32) (slot uint32, ok bool) {
	c := &s.class[id]
	if c.room == NoSlab && !s.assign(id) {
		return 0, false
	}
	n := c.room
	b := &s.slab[n]
	var place uint32
	if b.free != 0 {
		place = b.free - 1
		b.free = s.At(s.Slot(n, place)).Link
	} else {
		place = b.fresh
		b.fresh++
	}
	b.used++
	c.used++
	s.used += int64(c.bytes)
	if s.full(n) {
		s.leaveRoom(n)
	}
	return s.Slot(n, place), true
}

// Give frees a slot, and its slab if no other slot of it is used.
func (s *Slabs) Give(slot uint32) {
	n := int32(slot >> s.slotBits)
	b := &s.slab[n]
	c := &s.class[b.class]
	place := slot & (1<<s.slotBits - 1)
	*s.At(slot), s.states.All[slot] = Cell{Link: b.free}, Empty
	b.free = place + 1
	if b.bad {
		c.retired++
	} else if s.full(n) {
		s.enterRoom(n)
	}
	b.used--
	c.used--
	s.used -= int64(c.bytes)
	if b.used == 0 {
		s.withdraw(n)
	}
}

func (s *Slabs) assign(id int32) bool {
	if len(s.unused) == 0 {
		return false
	}
	c := &s.class[id]
	n := s.unused[len(s.unused)-1]
	b := &s.slab[n]
	if b.headers < c.perSlab {
		if !s.file.ProvideHeaders(s.Slot(n, 0), c.perSlab) {
			return false
		}
		b.headers = c.perSlab
	}
	s.file.Assign(n, c.bytes)
	s.unused = s.unused[:len(s.unused)-1]
	if b.last != NoClass && b.last != id {
		s.moved++
	}
	*b = slab{class: id, last: id, headers: b.headers}
	c.slabs++
	s.enterRoom(n)
	return true
}

func (s *Slabs) withdraw(n int32) {
	b := &s.slab[n]
	c := &s.class[b.class]
	if b.bad {
		c.retired -= int(c.perSlab)
	} else {
		s.leaveRoom(n)
		s.unused = append(s.unused, n)
	}
	s.file.Withdraw(n)
	c.slabs--
	b.class = NoClass
}

func (s *Slabs) enterRoom(n int32) {
	c := &s.class[s.slab[n].class]
	s.slab[n].next, s.slab[n].prev = c.room, NoSlab
	if c.room != NoSlab {
		s.slab[c.room].prev = n
	}
	c.room = n
}

func (s *Slabs) leaveRoom(n int32) {
	b := &s.slab[n]
	if b.prev != NoSlab {
		s.slab[b.prev].next = b.next
	} else {
		s.class[b.class].room = b.next
	}
	if b.next != NoSlab {
		s.slab[b.next].prev = b.prev
	}
}

// At returns the cell of a slot.
func (s *Slabs) At(slot uint32) *Cell { return &s.cells.All[slot] }

// State returns the state of a slot's shard.
func (s *Slabs) State(slot uint32) *State { return &s.states.All[slot] }

// Offset returns the offset of a slot in the arena.
func (s *Slabs) Offset(slot uint32) int64 {
	n := slot >> s.slotBits
	size := int64(s.class[s.slab[n].class].bytes)
	return int64(n)*s.bytes + int64(slot&(1<<s.slotBits-1))*size
}

// InUse returns for each slot of a slab whether it is used; valid until the next call.
func (s *Slabs) InUse(n int32) []bool {
	b := &s.slab[n]
	if s.inUseBuf == nil {
		s.inUseBuf = make([]bool, 1<<s.slotBits)
	}
	used := s.inUseBuf[:b.fresh]
	for i := range used {
		used[i] = true
	}
	for at := b.free; at != 0; at = s.At(s.Slot(n, at-1)).Link {
		used[at-1] = false
	}
	return used
}

// full reports whether no slot of a slab that belongs to a class can be allocated.
func (s *Slabs) full(n int32) bool {
	b := &s.slab[n]
	return b.bad || b.used == s.class[b.class].perSlab
}

// Lacking returns a class with too few free slots for an entry that has a slot of each of these, or
// NoClass if free slots and free slabs are enough.
func (s *Slabs) Lacking(classes []int32) int32 {
	unused := len(s.unused)
	for i := len(classes) - 1; i >= 0; i-- {
		id, n := classes[i], 0
		if slices.Contains(classes[i+1:], id) {
			continue
		}
		for _, other := range classes[:i+1] {
			if other == id {
				n++
			}
		}
		perSlab := int(s.class[id].perSlab)
		if unused -= (max(n-s.Free(id), 0) + perSlab - 1) / perSlab; unused < 0 {
			return id
		}
	}
	return NoClass
}

// Free returns the number of slots of a class that can be allocated.
func (s *Slabs) Free(id int32) int {
	c := &s.class[id]
	return c.slabs*int(c.perSlab) - c.used - c.retired
}

// SlabOf returns the slab of a slot.
func (s *Slabs) SlabOf(slot uint32) int32 { return int32(slot >> s.slotBits) }

// Slot returns the slot at a place of a slab.
func (s *Slabs) Slot(n int32, place uint32) uint32 { return uint32(n)<<s.slotBits | place }

// Slots returns the first slot of a slab as it is cut now, and the one after the last ever used.
func (s *Slabs) Slots(n int32) (first, end uint32) {
	if s.slab[n].class == NoClass {
		return 0, 0
	}
	first = s.Slot(n, 0)
	return first, first + s.slab[n].fresh
}

// Given reports whether a number is a slot that was ever used, as slabs are cut now.
func (s *Slabs) Given(slot uint32) bool {
	n := slot >> s.slotBits
	return int(n) < len(s.slab) && s.slab[n].class != NoClass && slot&(1<<s.slotBits-1) < s.slab[n].fresh
}

// ClassAt returns the class of a slot's slab.
func (s *Slabs) ClassAt(slot uint32) int32 { return s.slab[slot>>s.slotBits].class }

// SizeAt returns the bytes of a slot.
func (s *Slabs) SizeAt(slot uint32) int64 { return s.SlotBytes(s.ClassAt(slot)) }

// SlotBytes returns the bytes of a slot of a class.
func (s *Slabs) SlotBytes(id int32) int64 { return int64(s.class[id].bytes) }

// PerSlab returns how many slots of a class a slab has.
func (s *Slabs) PerSlab(id int32) int { return int(s.class[id].perSlab) }

// Count returns the number of slabs.
func (s *Slabs) Count() int { return len(s.slab) }

// UsedBytes returns the bytes of the used slots.
func (s *Slabs) UsedBytes() int64 { return s.used }

// Reassigned returns how many slabs went to another class.
func (s *Slabs) Reassigned() uint64 { return s.moved }

// Stats returns the classes that have slabs.
func (s *Slabs) Stats() (out []pool.ClassStats) {
	for _, k := range s.class {
		if k.slabs > 0 {
			out = append(out, pool.ClassStats{
				SlotBytes: int64(k.bytes), Slabs: k.slabs, Used: k.used, Slots: k.slabs * int(k.perSlab),
			})
		}
	}
	return out
}

// Close unmaps the cells and states.
func (s *Slabs) Close() error { return errors.Join(s.cells.Close(), s.states.Close()) }
