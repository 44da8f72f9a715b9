package slab

// What is asked of classes when one of them takes a slab of another.

// Classes is how many there are.
func (s *Slabs) Classes() int32 { return int32(len(s.class)) }

// HasRoom says whether a class has a free slot in its own slabs.
func (s *Slabs) HasRoom(id int32) bool { return s.class[id].room != NoSlab }

// SlabsOf is how many slabs a class has.
func (s *Slabs) SlabsOf(id int32) int { return s.class[id].slabs }

// AnySpare says whether some class has as many free slots as a slab.
func (s *Slabs) AnySpare() bool { return s.spares > 0 }

// Spare says whether a class has.
func (s *Slabs) Spare(id int32) bool { return s.class[id].spare }

// UsedIn is the bytes of the slots in use of a slab.
func (s *Slabs) UsedIn(n int32) int64 { return int64(s.slab[n].used) * s.SlotBytes(s.slab[n].class) }

// Emptiest fills near with the slabs of a class that have the fewest slots in use and would have
// one for another class, the emptiest first, and returns how many they are. The one that is being
// emptied is not among them.
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

// Drain gives no further slot of a slab.
func (s *Slabs) Drain(n int32) {
	if !s.full(n) {
		s.leaveRoom(n)
	}
	s.draining = n
}

// EndDrain ends that, and says whether the slab is free now; else slots of it are given again.
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
