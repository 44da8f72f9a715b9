package dram

import "github.com/kvagent/kvagent/pagefault"

// Bad pages of the arena in a file: words of the superblock's page, each 0 or the number of a page
// and a check of it. A word is written once, in one store, and stays until the file is made anew:
// its pages are others then.
const (
	superBad    = 1024 // the first word
	superBadEnd = superBad + 8*MaxBadPages
)

func badWord(page int64) uint64 {
	w := uint64(page) << 8
	return w | slabCheck(w)
}

// markBad notes a page of the arena that must not be used in another life either. With no word left
// it is found again there.
func (f *file) markBad(page int64) {
	if f == nil {
		return
	}
	f.touch(func() {
		for at := superBad; at < superBadEnd; at += 8 {
			if w := word(f.whole, at); w.Load() == 0 {
				w.Store(badWord(page))
				return
			}
		}
	})
}

// restoreBad retires what was retired in another life. No slab is cut yet.
func (c *core) restoreBad(f *file) {
	arena := int64(len(c.slabs.slab)) * c.slabs.bytes
	f.touch(func() {
		for at := superBad; at < superBadEnd; at += 8 {
			w := word(f.whole, at).Load()
			page := int64(w >> 8)
			if w == 0 || w != badWord(page) || page >= (arena+c.slabs.bad.page-1)/c.slabs.bad.page {
				continue
			}
			c.retirePage(page * c.slabs.bad.page)
		}
	})
}

// touch runs do, which reads or writes what follows the arena, and reports whether no page of it
// faulted. What was in a page that faults is lost: its headers count as free, its spaces as
// forgotten.
func (f *file) touch(do func()) bool {
	if pagefault.Guard(f.meta, nil, do) == nil {
		return true
	}
	f.faults.Add(1)
	return false
}

// touchEach is touch for each number from one to before another. It goes on after one that faults,
// and counts those.
func (f *file) touchEach(from, to uint32, do func(i uint32)) (faulted int64) {
	for i := from; i < to; i++ {
		if f.touch(func() {
			for ; i < to; i++ {
				do(i)
			}
		}) {
			break
		}
		faulted++
	}
	return faulted
}
