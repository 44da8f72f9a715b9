package dram

import "errors"

// errClash is damage of a kind that no kill leaves behind: then nothing of the file is used.
var errClash = errors.New("its slabs overlap")

// restore cuts slabs as the file says. What it says of one slab alone is passed over if it is damaged.
func (s *slabs) restore() error {
	for n := range s.slab {
		first, slotBytes, ok := s.file.slab(int32(n))
		if !ok || int64(slotBytes) > s.bytes || slotBytes == 0 {
			continue
		}
		id := s.classOf(slotBytes)
		if int64(first)+int64(s.class[id].perSlab) > int64(s.file.usableHeaders()) {
			continue
		}
		b := &s.slab[n]
		*b = slab{class: id, last: id, cells: first, fresh: s.class[id].perSlab}
		if !s.spans.mark(first, b.fresh) {
			return errClash
		}
	}
	if !s.cells.grow(int(s.spans.high)) {
		return errors.New("dram: no memory for slots")
	}
	return nil
}

// claims are the cells of slots in use while slabs are restored, a bit each.
type claims []uint64

func (s *slabs) newClaims() claims { return make(claims, s.spans.high/64+1) }

// claim notes that a slot is in use.
func (s *slabs) claim(claimed claims, slot uint32) {
	at := s.cell(slot)
	claimed[at/64] |= 1 << (at % 64)
	s.slab[slot>>s.slotBits].used++
}

// unclaim notes that it is not.
func (s *slabs) unclaim(claimed claims, slot uint32) {
	at := s.cell(slot)
	claimed[at/64] &^= 1 << (at % 64)
	s.slab[slot>>s.slotBits].used--
}

// open makes the free slots of restored slabs usable, and slabs without used ones free.
func (s *slabs) open(claimed claims) {
	s.unused = s.unused[:0]
	for n := int32(len(s.slab)) - 1; n >= 0; n-- {
		b := &s.slab[n]
		if b.class == noClass {
			s.unused = append(s.unused, n)
			s.file.withdraw(n)
			continue
		}
		k := &s.class[b.class]
		k.slabs++
		k.used += int(b.used)
		s.used += int64(b.used) * int64(k.bytes)
		for place := int64(b.fresh) - 1; place >= 0; place-- {
			at := b.cells + uint32(place)
			if claimed[at/64]&(1<<(at%64)) == 0 {
				if slot := uint32(n)<<s.slotBits | uint32(place); s.isBad(slot) {
					s.leave(slot)
					continue
				}
				s.cells.all[at] = cell{link: b.free}
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
