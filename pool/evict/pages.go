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

// links chain a record with others by their use; 0 at the ends.
type links struct{ newer, older uint32 }

func (l *links) self() *links { return l }

// linked is a pointer to a record with links.
type linked[T any] interface {
	*T
	self() *links
}

// order is records by their use.
type order struct{ newest, oldest uint32 }

// insert puts a record behind an older one of an order; 0: it is the oldest.
func insert[T any, P linked[T]](o *order, of pages[T], i, older uint32) {
	newer, back := &o.oldest, &o.newest
	if older != 0 {
		newer = &P(of.at(older)).self().newer
	}
	if *newer != 0 {
		back = &P(of.at(*newer)).self().older
	}
	*P(of.at(i)).self() = links{*newer, older}
	*newer, *back = i, i
}

// remove takes a record out of an order.
func remove[T any, P linked[T]](o *order, of pages[T], i uint32) {
	at, newer, back := P(of.at(i)).self(), &o.oldest, &o.newest
	if at.older != 0 {
		newer = &P(of.at(at.older)).self().newer
	}
	if at.newer != 0 {
		back = &P(of.at(at.newer)).self().older
	}
	*newer, *back = at.newer, at.older
}
