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
