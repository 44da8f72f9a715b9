package slab

import "errors"

// ErrClash is damage that no kill of a process can cause; nothing of the file is used then.
var ErrClash = errors.New("its slabs overlap")

// Restore cuts slabs as the file describes them. It skips the damaged description of a single slab.
func (s *Slabs) Restore() error {
	for n := range s.slab {
		first, slotBytes, ok := s.file.Slab(int32(n))
		if !ok || int64(slotBytes) > s.bytes || slotBytes == 0 {
			continue
		}
		id := s.ClassOf(slotBytes)
		if int64(first)+int64(s.class[id].perSlab) > int64(s.file.UsableHeaders()) {
			continue
		}
		b := &s.slab[n]
		*b = slab{class: id, last: id, cells: first, fresh: s.class[id].perSlab}
		if !s.spans.mark(first, b.fresh) {
			return ErrClash
		}
	}
	if !s.cells.Grow(int(s.spans.high)) {
		return errors.New("dram: no memory for slots")
	}
	return nil
}

// Claims are the cells of used slots while slabs are restored, a bit each.
type Claims []uint64

// NewClaims returns empty claims.
func (s *Slabs) NewClaims() Claims { return make(Claims, s.spans.high/64+1) }

// Claim marks a slot as used.
func (s *Slabs) Claim(claimed Claims, slot uint32) {
	at := s.Cell(slot)
	claimed[at/64] |= 1 << (at % 64)
	s.slab[slot>>s.slotBits].used++
}

// Unclaim marks a slot as free.
func (s *Slabs) Unclaim(claimed Claims, slot uint32) {
	at := s.Cell(slot)
	claimed[at/64] &^= 1 << (at % 64)
	s.slab[slot>>s.slotBits].used--
}

// Open makes the free slots of restored slabs usable, and frees slabs without used slots.
func (s *Slabs) Open(claimed Claims) {
	s.unused = s.unused[:0]
	for n := int32(len(s.slab)) - 1; n >= 0; n-- {
		b := &s.slab[n]
		if b.class == NoClass {
			s.unused = append(s.unused, n)
			s.file.Withdraw(n)
			continue
		}
		k := &s.class[b.class]
		k.slabs++
		k.used += int(b.used)
		s.used += int64(b.used) * int64(k.bytes)
		for place := int64(b.fresh) - 1; place >= 0; place-- {
			at := b.cells + uint32(place)
			if claimed[at/64]&(1<<(at%64)) == 0 {
				s.cells.All[at] = Cell{Link: b.free}
				b.free = uint32(place) + 1
			}
		}
		if !s.full(n) {
			s.enterRoom(n)
		}
		if b.used == 0 {
			s.withdraw(n)
		}
	}
}

// These methods serve a class that takes a slab of another class.

// Classes returns the number of classes.
func (s *Slabs) Classes() int32 { return int32(len(s.class)) }

// MayGo reports whether a slab belongs to another class than this one, and is not retired.
func (s *Slabs) MayGo(n, class int32) bool {
	return s.slab[n].class != NoClass && s.slab[n].class != class && !s.slab[n].bad
}

// UsedIn returns the bytes of the used slots of a slab.
func (s *Slabs) UsedIn(n int32) int64 {
	if s.slab[n].class == NoClass {
		return 0
	}
	return int64(s.slab[n].used) * s.SlotBytes(s.slab[n].class)
}
