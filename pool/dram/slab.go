package dram

import (
	"math/bits"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// The arena is cut into slabs of equal size. A slab is free or belongs to a class, which cuts it into slots
// of one size. A slot's number is slab<<slotBits | place in the slab.

// cell is what the pool keeps of a slot in use. The slots of an entry are linked from that of shard 0 on; the
// last one's link is the entry, with upward set. The link of a free slot is the next free one of its slab, +1.
type cell struct{ link, sum uint32 }

type slab struct {
	class      int32  // noClass: free
	last       int32  // class it had before
	cells      uint32 // first of its cells
	fresh      uint32 // slots from here on were never used
	used       uint32
	retired    uint32 // slots that are out of use; see badMemory
	free       uint32 // first free slot below fresh, +1
	next, prev int32  // slabs of the class that have room, noSlab at the ends
}

const (
	noClass = int32(-1)
	noSlab  = int32(-1)
)

type class struct {
	bytes   uint32 // of a slot
	perSlab uint32
	room    int32 // first slab with a free slot
	slabs   int
	used    int
	retired int  // slots out of use
	spare   bool // as many slots are free as a slab has, so that moving entries empties one
}

type slabs struct {
	slab     []slab
	class    []class
	byBytes  map[uint32]int32
	cells    region[cell]
	spans    spans // of cells
	unused   []int32
	file     *file // nil: the pool ends with the process
	bytes    int64 // of a slab
	slotBits uint
	inUseBuf []bool
	used     int64  // bytes of slots in use
	moved    uint64 // slabs that went to another class
	bad      badMemory
	spares   int   // classes with spare set
	draining int32 // slab being emptied, of which no slot is given; noSlab: none
}

// newSlabs cuts an arena into slabs. Page is the bytes of a page of it; f may be nil.
func newSlabs(arena, slabBytes, page int64, f *file) (s slabs, err error) {
	n := int(arena / slabBytes)
	s = slabs{
		slab: make([]slab, n), byBytes: map[uint32]int32{}, bytes: slabBytes,
		slotBits: uint(bits.TrailingZeros64(uint64(slabBytes / slotUnit))), draining: noSlab,
		bad: badMemory{page: page}, file: f,
	}
	for i := n - 1; i >= 0; i-- {
		s.slab[i] = slab{class: noClass, last: noClass}
		s.unused = append(s.unused, int32(i)) // the first is given first: it is populated first
	}
	// Twice the slots there can be, so that spans find their place between others.
	s.cells, err = reserveRegion[cell](2 * int(arena/slotUnit))
	return s, err
}

// classOf is the class for shards of n bytes, made at first.
func (s *slabs) classOf(n uint32) int32 {
	size := (n + slotUnit - 1) &^ (slotUnit - 1)
	id, ok := s.byBytes[size]
	if !ok {
		id = int32(len(s.class))
		s.class = append(s.class, class{bytes: size, perSlab: uint32(s.bytes / int64(size)), room: noSlab})
		s.byBytes[size] = id
	}
	return id
}

// take gives a slot of a class; false if the class has none and no slab is free.
func (s *slabs) take(id int32) (slot uint32, ok bool) {
	c := &s.class[id]
	if c.room == noSlab && !s.assign(id) {
		return 0, false
	}
	n := c.room
	b := &s.slab[n]
	var place uint32
	if b.free != 0 {
		place = b.free - 1
		b.free = s.cells.all[b.cells+place].link
	} else {
		place = s.pass(n, b.fresh)
		b.fresh = place + 1
	}
	b.used++
	c.used++
	s.used += int64(c.bytes)
	s.weigh(c)
	if s.full(n) {
		s.leaveRoom(n)
	}
	return uint32(n)<<s.slotBits | place, true
}

// give takes a slot back, and its slab if that was the last one in it.
func (s *slabs) give(slot uint32) {
	n := int32(slot >> s.slotBits)
	b := &s.slab[n]
	c := &s.class[b.class]
	if s.isBad(slot) {
		s.leave(slot) // the slab has as much room as before
	} else {
		place := slot & (1<<s.slotBits - 1)
		s.cells.all[b.cells+place] = cell{link: b.free}
		b.free = place + 1
		if s.full(n) && n != s.draining {
			s.enterRoom(n)
		}
	}
	b.used--
	c.used--
	s.used -= int64(c.bytes)
	if b.used == 0 {
		s.withdraw(n)
	}
	s.weigh(c)
}

func (s *slabs) assign(id int32) bool {
	at := s.unusedFor(id)
	if at < 0 {
		return false
	}
	c := &s.class[id]
	first, ok := s.spans.take(c.perSlab)
	if !ok {
		return false
	}
	n := s.unused[at]
	if !s.cells.grow(int(first+c.perSlab)) || !s.file.assign(n, first, c.perSlab, c.bytes) {
		s.spans.give(first, c.perSlab)
		return false
	}
	s.unused = slices.Delete(s.unused, at, at+1)
	b := &s.slab[n]
	if b.last != noClass && b.last != id {
		s.moved++
	}
	*b = slab{class: id, last: id, cells: first}
	s.cutAround(n)
	c.slabs++
	s.enterRoom(n)
	return true
}

func (s *slabs) withdraw(n int32) {
	b := &s.slab[n]
	c := &s.class[b.class]
	if n == s.draining {
		s.draining = noSlab
	} else if b.retired < c.perSlab {
		s.leaveRoom(n)
	}
	s.uncut(n)
	s.file.withdraw(n)
	s.spans.give(b.cells, c.perSlab)
	c.slabs--
	b.class = noClass
	s.unused = append(s.unused, n)
}

func (s *slabs) enterRoom(n int32) {
	c := &s.class[s.slab[n].class]
	s.slab[n].next, s.slab[n].prev = c.room, noSlab
	if c.room != noSlab {
		s.slab[c.room].prev = n
	}
	c.room = n
}

func (s *slabs) leaveRoom(n int32) {
	b := &s.slab[n]
	if b.prev != noSlab {
		s.slab[b.prev].next = b.next
	} else {
		s.class[b.class].room = b.next
	}
	if b.next != noSlab {
		s.slab[b.next].prev = b.prev
	}
}

// at is the cell of a slot.
func (s *slabs) at(slot uint32) *cell {
	return &s.cells.all[s.slab[slot>>s.slotBits].cells+slot&(1<<s.slotBits-1)]
}

// offset is where a slot lies in the arena.
func (s *slabs) offset(slot uint32) int64 {
	n := slot >> s.slotBits
	size := int64(s.class[s.slab[n].class].bytes)
	return int64(n)*s.bytes + int64(slot&(1<<s.slotBits-1))*size
}

// inUse says of each slot of a slab whether it is in use. It is valid until the next call.
func (s *slabs) inUse(n int32) []bool {
	b := &s.slab[n]
	if s.inUseBuf == nil {
		s.inUseBuf = make([]bool, 1<<s.slotBits)
	}
	used := s.inUseBuf[:b.fresh]
	for i := range used {
		used[i] = true
	}
	for at := b.free; at != 0; at = s.cells.all[b.cells+at-1].link {
		used[at-1] = false
	}
	if b.retired > 0 {
		for _, place := range s.badPlaces(n, b.class) {
			if place < b.fresh && s.bad.out[uint32(n)<<s.slotBits|place] {
				used[place] = false
			}
		}
	}
	return used
}

// full reports whether no slot of a slab that belongs to a class is free.
func (s *slabs) full(n int32) bool {
	b := &s.slab[n]
	return b.used+b.retired == s.class[b.class].perSlab
}

// lacking returns a class with too few free slots for an entry that has a slot of each of these, or
// noClass if free slots and free slabs are enough.
func (s *slabs) lacking(classes []int32) int32 {
	unused := s.unused
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
		var enough bool
		if unused, enough = s.without(unused, id, n-s.free(id)); !enough {
			return id
		}
	}
	return noClass
}

// without returns what is left of free slabs when a class has taken slabs with so many slots;
// enough is false if there are too few.
func (s *slabs) without(unused []int32, id int32, slots int) (left []int32, enough bool) {
	if perSlab := int(s.class[id].perSlab); slots > 0 && len(s.bad.ranges) == 0 {
		taken := (slots + perSlab - 1) / perSlab
		return unused[:max(len(unused)-taken, 0)], taken <= len(unused)
	}
	for slots > 0 {
		at := s.usableOf(unused, id)
		if at < 0 {
			return nil, false
		}
		slots -= int(s.class[id].perSlab) - len(s.badPlaces(unused[at], id))
		unused = slices.Delete(slices.Clone(unused), at, at+1)
	}
	return unused, true
}

// free is the number of free slots of a class that may be given.
func (s *slabs) free(id int32) int {
	c := &s.class[id]
	n := c.free()
	if s.draining != noSlab && s.slab[s.draining].class == id {
		n -= int(c.perSlab - s.slab[s.draining].used - s.slab[s.draining].retired)
	}
	return n
}

// free is the number of slots that are neither in use nor out of use.
func (c *class) free() int { return c.slabs*int(c.perSlab) - c.used - c.retired }

// weigh keeps spare of a class and their number.
func (s *slabs) weigh(c *class) {
	if spare := c.slabs > 0 && c.free() >= int(c.perSlab); spare != c.spare {
		c.spare = spare
		if spare {
			s.spares++
		} else {
			s.spares--
		}
	}
}

// What the slots of an entry, and their headers in the pool's file, are found by.

// cell is the number of a slot's cell, and of its header in the pool's file.
func (s *slabs) cell(slot uint32) uint32 {
	return s.slab[slot>>s.slotBits].cells + slot&(1<<s.slotBits-1)
}

// slabOf is the slab a slot lies in.
func (s *slabs) slabOf(slot uint32) int32 { return int32(slot >> s.slotBits) }

// slot is the one at a place of a slab.
func (s *slabs) slot(n int32, place uint32) uint32 { return uint32(n)<<s.slotBits | place }

// slots are the first slot of a slab, and the one after the last that was ever given: as they are cut now.
func (s *slabs) slots(n int32) (first, end uint32) {
	if s.slab[n].class == noClass {
		return 0, 0
	}
	first = s.slot(n, 0)
	return first, first + s.slab[n].fresh
}

// given says of any number whether it is a slot that was ever given, as slabs are cut now.
func (s *slabs) given(slot uint32) bool {
	n := slot >> s.slotBits
	return int(n) < len(s.slab) && s.slab[n].class != noClass && slot&(1<<s.slotBits-1) < s.slab[n].fresh
}

// classAt is the class of a slot's slab.
func (s *slabs) classAt(slot uint32) int32 { return s.slab[slot>>s.slotBits].class }

// sizeAt is the bytes of a slot.
func (s *slabs) sizeAt(slot uint32) int64 { return s.slotBytes(s.classAt(slot)) }

// slotBytes is the bytes of a slot of a class.
func (s *slabs) slotBytes(id int32) int64 { return int64(s.class[id].bytes) }

// perSlab is how many slots of a class a slab is cut into.
func (s *slabs) perSlab(id int32) int { return int(s.class[id].perSlab) }

// count is the number of slabs.
func (s *slabs) count() int { return len(s.slab) }

// usedBytes is the bytes of the slots in use.
func (s *slabs) usedBytes() int64 { return s.used }

// reassigned is how many slabs went to another class.
func (s *slabs) reassigned() uint64 { return s.moved }

// stats are the classes that have slabs.
func (s *slabs) stats() (out []pool.ClassStats) {
	for _, k := range s.class {
		if k.slabs > 0 {
			out = append(out, pool.ClassStats{
				SlotBytes: int64(k.bytes), Slabs: k.slabs, Used: k.used, Slots: k.slabs * int(k.perSlab),
			})
		}
	}
	return out
}

// resident is the memory of the cells that were ever used.
func (s *slabs) resident() int64 { return s.cells.resident(int(s.spans.high)) }

// close gives the cells back.
func (s *slabs) close() error { return s.cells.close() }

// mapped is the memory of the cells.
func (s *slabs) mapped() []byte { return s.cells.mapped() }
