package slab

import "fmt"

// Check returns the first count that is wrong, given the used slots with their owners.
func (s *Slabs) Check(owners map[uint32]uint32) error {
	unused := map[int32]bool{}
	for _, n := range s.unused {
		unused[n] = true
	}
	perSlab := map[int32]int{}
	for slot := range owners {
		perSlab[int32(slot>>s.slotBits)]++
	}
	for i := range s.slab {
		b, n := &s.slab[i], int32(i)
		if unused[n] != (b.class == NoClass) || (b.class == NoClass) != (perSlab[n] == 0) {
			return fmt.Errorf("slab %d: class %d, %d slots in use, free %v", n, b.class, perSlab[n], unused[n])
		}
		if b.class == NoClass {
			continue
		}
		used := 0
		for _, is := range s.InUse(n) {
			if is {
				used++
			}
		}
		if used != perSlab[n] || used != int(b.used) {
			return fmt.Errorf("slab %d: %d slots in use, %d not free, counts %d", n, perSlab[n], used, b.used)
		}
		if err := s.checkRetired(n, owners); err != nil {
			return err
		}
	}
	return nil
}

// checkRetired checks that each slot that overlaps a bad range is held by a dropped entry, or
// retired.
func (s *Slabs) checkRetired(n int32, owners map[uint32]uint32) error {
	out := 0
	for _, place := range s.badPlaces(n, s.slab[n].class) {
		slot := uint32(n)<<s.slotBits | place
		owner, used := owners[slot]
		if used == s.bad.out[slot] {
			return fmt.Errorf("slot %d overlaps a bad page: entry %d, in use and out of use: %v", slot, owner, used)
		}
		if !used {
			out++
		}
	}
	if b := &s.slab[n]; out != int(b.retired) || b.used+b.retired > s.class[b.class].perSlab {
		return fmt.Errorf("slab %d: %d slots in use, %d out of use, counts %d", n, b.used, out, b.retired)
	}
	return nil
}
