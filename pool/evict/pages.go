package evict

import "unsafe"

const (
	pageBits = 10
	pageLen  = 1 << pageBits
)

// pages are records by number, from 0 on. They grow by the page, so that nobody waits for a copy of all.
type pages[T any] []*[pageLen]T

func (p pages[T]) at(i uint32) *T { return &p[i>>pageBits][i&(pageLen-1)] }

func (p pages[T]) has(i uint32) bool { return int(i>>pageBits) < len(p) }

// make is a record that may not be there yet.
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
