package mem

import "slices"

type extent struct{ off, len int64 }

// extents are the free stretches of the arena, by offset, never two adjacent ones.
type extents []extent

func (e *extents) take(n int64) (off int64, ok bool) {
	for i := range *e {
		x := &(*e)[i]
		if x.len < n {
			continue
		}
		off = x.off
		x.off, x.len = x.off+n, x.len-n
		if x.len == 0 {
			*e = slices.Delete(*e, i, i+1)
		}
		return off, true
	}
	return 0, false
}

func (e *extents) give(off, n int64) {
	i, _ := slices.BinarySearchFunc(*e, off, func(x extent, off int64) int { return int(x.off - off) })
	*e = slices.Insert(*e, i, extent{off, n})
	if i+1 < len(*e) && off+n == (*e)[i+1].off {
		(*e)[i].len += (*e)[i+1].len
		*e = slices.Delete(*e, i+1, i+2)
	}
	if i > 0 && (*e)[i-1].off+(*e)[i-1].len == off {
		(*e)[i-1].len += (*e)[i].len
		*e = slices.Delete(*e, i, i+1)
	}
}

func (e extents) sum() (n int64) {
	for _, x := range e {
		n += x.len
	}
	return n
}

func slotBytes(n uint32) int64 { return (int64(n) + Unit - 1) / Unit * Unit }
