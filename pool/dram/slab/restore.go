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
				if slot := uint32(n)<<s.slotBits | uint32(place); s.IsBad(slot) {
					s.leave(slot)
					continue
				}
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
		s.weigh(k)
	}
}

// These methods serve a class that takes a slab of another class.

// Classes returns the number of classes.
func (s *Slabs) Classes() int32 { return int32(len(s.class)) }

// HasRoom reports whether a class has a free slot in its own slabs.
func (s *Slabs) HasRoom(id int32) bool { return s.class[id].room != NoSlab }

// SlabsOf returns the number of slabs of a class.
func (s *Slabs) SlabsOf(id int32) int { return s.class[id].slabs }

// AnySpare reports whether some class has as many free slots as a slab has.
func (s *Slabs) AnySpare() bool { return s.spares > 0 }

// Spare reports whether a class has as many free slots as a slab has.
func (s *Slabs) Spare(id int32) bool { return s.class[id].spare }

// UsedIn returns the bytes of the used slots of a slab.
func (s *Slabs) UsedIn(n int32) int64 { return int64(s.slab[n].used) * s.SlotBytes(s.slab[n].class) }

// Emptiest fills near with the slabs of a class that have the fewest used slots and would have a
// slot for another class, the emptiest first, and returns their number. It excludes the draining
// slab.
func (s *Slabs) Emptiest(id, other int32, near []int32) (n int) {
	for i := range s.slab {
		b := &s.slab[i]
		if b.class != id || int32(i) == s.draining || !s.usable(int32(i), other) {
			continue
		}
		at := n
		for at > 0 && s.slab[near[at-1]].used > b.used {
			at--
		}
		if at == len(near) {
			continue
		}
		n = min(n+1, len(near))
		copy(near[at+1:n], near[at:])
		near[at] = int32(i)
	}
	return n
}

// Drain stops allocation of slots of a slab.
func (s *Slabs) Drain(n int32) {
	if !s.full(n) {
		s.leaveRoom(n)
	}
	s.draining = n
}

// EndDrain ends draining, and reports whether the slab is free now or else allocated from again.
func (s *Slabs) EndDrain(n int32) (emptied bool) {
	if s.draining != n {
		return true
	}
	s.draining = NoSlab
	if !s.full(n) {
		s.enterRoom(n)
	}
	return false
}
