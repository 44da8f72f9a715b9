package dram

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

// slotShard is what a used slot has of its shard. The slots of an entry are linked from that of
// shard 0 on; the last one's link is the entry, with upward set. The link of a free slot is the
// next free one of its slab, +1.
type slotShard struct{ link, sum uint32 }

// shardState is that of the shard for which a slot was taken.
type shardState uint8

// States of a shard.
const (
	shardEmpty shardState = iota
	shardWriting
	shardPresent
)

type slab struct {
	class   int32  // noClass: free
	last    int32  // class it had before
	headers uint32 // slots that have one with memory in the file
	fresh   uint32 // slots from here on have never been used
	used    uint32
	bad     bool   // retired: no slot is allocated
	free    uint32 // first free slot below fresh, +1
}

const noClass = int32(-1)

type class struct {
	bytes   uint32 // of a slot
	perSlab uint32
	room    []int32 // slabs with a free slot, and some that have none by now
	slabs   int
	used    int
	retired int // free slots of its retired slabs
}

// slabs are the slabs of an arena. Its methods are called with the pool's lock held.
type slabs struct {
	slab     []slab
	class    []class
	byBytes  map[uint32]int32
	shards   offheap.Region[slotShard]  // by slot
	states   offheap.Region[shardState] // by slot
	unused   []int32
	file     *arena.File // nil: the pool ends with the process
	bytes    int64       // of a slab
	slotBits uint
	inUseBuf []bool
	used     int64  // bytes of slots in use
	moved    uint64 // slabs that went to another class
	barren   bool   // the file had no room for the headers of an unused slab: they do not count

	page     int64          // bytes of one of the arena
	badPages map[int64]bool // retired, by their offset
	bad      pool.BadMemory
}

// partBad is the part of its bytes without which a pool is not healthy.
const partBad = 8

// newSlabs cuts an arena into slabs. page is the size of its pages in bytes; f may be nil.
func newSlabs(bytes, slabBytes, page int64, f *arena.File) (s slabs, err error) {
	n := int(bytes / slabBytes)
	s = slabs{
		slab: make([]slab, n), byBytes: map[uint32]int32{}, bytes: slabBytes,
		slotBits: uint(bits.TrailingZeros64(uint64(slabBytes / arena.SlotUnit))),
		page:     page, badPages: map[int64]bool{}, file: f,
		bad: pool.BadMemory{MaxPages: arena.MaxBadPages, MaxBytes: int64(n) * slabBytes / partBad},
	}
	for i := n - 1; i >= 0; i-- {
		s.slab[i] = slab{class: noClass, last: noClass}
		s.unused = append(s.unused, int32(i)) // the first is used first, as it is populated first
	}
	if s.shards, err = offheap.Map[slotShard](n << s.slotBits); err == nil {
		s.states, err = offheap.Map[shardState](n << s.slotBits)
	}
	return s, err
}

// restore cuts slabs as the file describes them, with all their slots in use. It skips what is
// damaged. Give frees the slots that are not.
func (s *slabs) restore() {
	s.unused = s.unused[:0]
	for n := int32(len(s.slab)) - 1; n >= 0; n-- {
		slotBytes := s.file.Slab(n)
		if slotBytes == 0 || int64(slotBytes) > s.bytes {
			s.unused = append(s.unused, n)
			s.file.Withdraw(n)
			continue
		}
		id := s.classOf(slotBytes)
		c := &s.class[id]
		s.slab[n] = slab{class: id, last: id, headers: c.perSlab, fresh: c.perSlab, used: c.perSlab}
		c.slabs++
		c.used += int(c.perSlab)
		s.used += int64(c.perSlab) * int64(c.bytes)
	}
}

// classOf returns the class for shards of n bytes, and makes it if necessary.
func (s *slabs) classOf(n uint32) int32 {
	size := (n + arena.SlotUnit - 1) &^ (arena.SlotUnit - 1)
	id, ok := s.byBytes[size]
	if !ok {
		id = int32(len(s.class))
		s.class = append(s.class, class{bytes: size, perSlab: uint32(s.bytes / int64(size))})
		s.byBytes[size] = id
	}
	return id
}

// take allocates a slot of a class; false if the class has none and no slab is free.
func (s *slabs) take(id int32) (slot uint32, ok bool) {
	c := &s.class[id]
	last := len(c.room) - 1
	for ; last >= 0 && (s.slab[c.room[last]].class != id || s.full(c.room[last])); last-- {
		c.room = c.room[:last]
	}
	if last < 0 {
		if !s.assign(id) {
			return 0, false
		}
		last = 0
	}
	n := c.room[last]
	b := &s.slab[n]
	var place uint32
	if b.free != 0 {
		place = b.free - 1
		b.free = s.at(s.slot(n, place)).link
	} else {
		place = b.fresh
		b.fresh++
	}
	b.used++
	c.used++
	s.used += int64(c.bytes)
	if s.full(n) {
		c.room = c.room[:last]
	}
	return s.slot(n, place), true
}

// give frees a slot, and its slab if no other slot of it is used.
func (s *slabs) give(slot uint32) {
	n := int32(slot >> s.slotBits)
	b := &s.slab[n]
	c := &s.class[b.class]
	place := slot & (1<<s.slotBits - 1)
	*s.at(slot), s.states.All[slot] = slotShard{link: b.free}, shardEmpty
	b.free = place + 1
	if b.bad {
		c.retired++
	} else if s.full(n) {
		c.room = append(c.room, n)
	}
	b.used--
	c.used--
	s.used -= int64(c.bytes)
	if b.used == 0 {
		s.withdraw(n)
	}
}

func (s *slabs) assign(id int32) bool {
	if len(s.unused) == 0 {
		return false
	}
	c := &s.class[id]
	n := s.unused[len(s.unused)-1]
	b := &s.slab[n]
	if b.headers < c.perSlab {
		if s.barren = !s.file.ProvideHeaders(s.slot(n, 0), c.perSlab); s.barren {
			return false
		}
		b.headers = c.perSlab
	}
	s.file.Assign(n, c.bytes)
	s.unused = s.unused[:len(s.unused)-1]
	if b.last != noClass && b.last != id {
		s.moved++
	}
	*b = slab{class: id, last: id, headers: b.headers}
	c.slabs++
	c.room = append(c.room, n)
	return true
}

func (s *slabs) withdraw(n int32) {
	b := &s.slab[n]
	c := &s.class[b.class]
	if b.bad {
		c.retired -= int(c.perSlab)
	} else {
		s.unused, s.barren = append(s.unused, n), false
	}
	s.file.Withdraw(n)
	c.slabs--
	b.class = noClass
}

// at returns what a used slot has of its shard.
func (s *slabs) at(slot uint32) *slotShard { return &s.shards.All[slot] }

// state returns the state of a slot's shard.
func (s *slabs) state(slot uint32) *shardState { return &s.states.All[slot] }

// offset returns the offset of a slot in the arena.
func (s *slabs) offset(slot uint32) int64 {
	n := slot >> s.slotBits
	size := int64(s.class[s.slab[n].class].bytes)
	return int64(n)*s.bytes + int64(slot&(1<<s.slotBits-1))*size
}

// inUse returns for each slot of a slab whether it is used; valid until the next call.
func (s *slabs) inUse(n int32) []bool {
	b := &s.slab[n]
	if s.inUseBuf == nil {
		s.inUseBuf = make([]bool, 1<<s.slotBits)
	}
	used := s.inUseBuf[:b.fresh]
	for i := range used {
		used[i] = true
	}
	for at := b.free; at != 0; at = s.at(s.slot(n, at-1)).link {
		used[at-1] = false
	}
	return used
}

// full reports whether no slot of a slab that belongs to a class can be allocated.
func (s *slabs) full(n int32) bool {
	b := &s.slab[n]
	return b.bad || b.used == s.class[b.class].perSlab
}

// lacking returns a class with too few free slots for an entry that has a slot of each of these, or
// noClass if free slots and free slabs are enough.
func (s *slabs) lacking(classes []int32) int32 {
	unused := len(s.unused)
	if s.barren {
		unused = 0
	}
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
		if unused -= (max(n-s.free(id), 0) + perSlab - 1) / perSlab; unused < 0 {
			return id
		}
	}
	return noClass
}

// free returns the number of slots of a class that can be allocated.
func (s *slabs) free(id int32) int {
	c := &s.class[id]
	return c.slabs*int(c.perSlab) - c.used - c.retired
}

// slot returns the slot at a place of a slab.
func (s *slabs) slot(n int32, place uint32) uint32 { return uint32(n)<<s.slotBits | place }

// slots returns the first slot of a slab as it is cut now, and the one after the last ever used.
func (s *slabs) slots(n int32) (first, end uint32) {
	if s.slab[n].class == noClass {
		return 0, 0
	}
	first = s.slot(n, 0)
	return first, first + s.slab[n].fresh
}

// classAt returns the class of a slot's slab.
func (s *slabs) classAt(slot uint32) int32 { return s.slab[slot>>s.slotBits].class }

// slotBytes returns the bytes of a slot of a class.
func (s *slabs) slotBytes(id int32) int64 { return int64(s.class[id].bytes) }

// stats returns the classes that have slabs.
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

// close unmaps what slots have.
func (s *slabs) close() error { return errors.Join(s.shards.Close(), s.states.Close()) }
