package dram

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

// These methods serve a class that takes a slab of another class.

// mayGo reports whether a slab belongs to another class than this one, and is not retired.
func (s *slabs) mayGo(n, class int32) bool {
	return s.slab[n].class != noClass && s.slab[n].class != class && !s.slab[n].bad
}

// usedIn returns the bytes of the used slots of a slab.
func (s *slabs) usedIn(n int32) int64 {
	if s.slab[n].class == noClass {
		return 0
	}
	return int64(s.slab[n].used) * s.slotBytes(s.slab[n].class)
}
