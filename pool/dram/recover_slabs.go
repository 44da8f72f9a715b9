package dram

import "slices"

// openSlabs makes the free slots of restored slabs usable, and slabs without used ones free.
func (c *core) openSlabs(claimed []uint64) {
	s := &c.slabs
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

// mark takes a stretch that was taken in another life; false if some of it is taken already.
func (s *spans) mark(first, n uint32) bool {
	if first >= s.top {
		if first > s.top {
			s.free = append(s.free, span{s.top, first - s.top})
		}
		s.top = first + n
		s.high = max(s.high, s.top)
		return true
	}
	i, found := slices.BinarySearchFunc(s.free, first, func(f span, at uint32) int { return int(int64(f.first) - int64(at)) })
	if !found {
		i--
	}
	if i < 0 || s.free[i].first+s.free[i].n < first+n {
		return false
	}
	f := s.free[i]
	var rest []span
	if f.first < first {
		rest = append(rest, span{f.first, first - f.first})
	}
	if end := f.first + f.n; first+n < end {
		rest = append(rest, span{first + n, end - first - n})
	}
	s.free = slices.Replace(s.free, i, i+1, rest...)
	return true
}
