package arena

// Bad pages of the arena in a file: words of the superblock's page, each 0 or the number of a page
// and a check of it. A word is written once, in one store, and stays until the file is made anew:
// its pages are others then.
const (
	MaxBadPages = 256  // pages that a file remembers; with so many the pool is not healthy
	superBad    = 1024 // the first word
	superBadEnd = superBad + 8*MaxBadPages
)

func badWord(page int64) uint64 {
	w := uint64(page) << 8
	return w | slabCheck(w)
}

// MarkBad notes a page of the arena that must not be used in another life either. With no word left
// it is found again there.
func (f *File) MarkBad(page int64) {
	if f == nil {
		return
	}
	f.Touch(func() {
		for at := superBad; at < superBadEnd; at += 8 {
			if w := word(f.whole, at); w.Load() == 0 {
				w.Store(badWord(page))
				return
			}
		}
	})
}

// BadPages names the pages of the arena that were retired in another life.
func (f *File) BadPages() (pages []int64) {
	l := &f.super.Layout
	f.Touch(func() {
		for at := superBad; at < superBadEnd; at += 8 {
			w := word(f.whole, at).Load()
			page := int64(w >> 8)
			if w == 0 || w != badWord(page) || page >= (l.arena+l.page-1)/l.page {
				continue
			}
			pages = append(pages, page)
		}
	})
	return pages
}
