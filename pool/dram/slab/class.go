package slab

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

// EndDrain ends draining and reports whether the slab is free now; otherwise its slots are
// allocated again.
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
