package evict

import "unsafe"

const (
	pageBits = 10
	pageLen  = 1 << pageBits
)

// pages are records by number, from 0 on. They grow page by page, so that growth never copies all
// of them.
type pages[T any] []*[pageLen]T

func (p pages[T]) at(i uint32) *T { return &p[i>>pageBits][i&(pageLen-1)] }

func (p pages[T]) has(i uint32) bool { return int(i>>pageBits) < len(p) }

// make returns a record, and allocates its page if necessary.
func (p *pages[T]) make(i uint32) *T {
	for !p.has(i) {
		*p = append(*p, new([pageLen]T))
	}
	return p.at(i)
}

func (p pages[T]) bytes() int64 {
	var page [pageLen]T
	return int64(len(p)) * int64(unsafe.Sizeof(page)+unsafe.Sizeof(&page))
}

// linear is the number of sets of a table that grows by one set at a time (linear hashing), so that
// growth never copies the whole table.
type linear struct {
	sets uint // in use
	half uint // the greatest power of two of sets not above sets
}

// home returns the set of a hash.
func (l *linear) home(hash uint64) uint {
	s := uint(hash) & (2*l.half - 1)
	if s >= l.sets {
		s -= l.half
	}
	return s
}

// next returns the set that is split next, between itself and a new set.
func (l *linear) next() uint { return l.sets - l.half }

// stays reports whether a member of the set that is split stays where it is.
func (l *linear) stays(hash uint64) bool { return uint(hash)&l.half == 0 }

// divided adds the new set.
func (l *linear) divided() {
	if l.sets++; l.sets == 2*l.half {
		l.half = l.sets
	}
}
