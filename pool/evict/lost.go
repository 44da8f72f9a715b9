package evict

import "unsafe"

// lost are the blocks that LRU would have and the pool gave up: no other block can be a hit of LRU and a miss of the pool.
type lost struct {
	linear
	heads  []*[headsAPage]uint32 // by set, the first of its blocks
	pages  []*[lostAPage]lostBlock
	made   uint32 // numbers given so far
	free   uint32 // the first of those given back
	blocks int
}

// lostBlock is one of them; their numbers have lostBit set, so that they can be members of a list with entries.
type lostBlock struct {
	print  uint64
	recent links
	used   uint32 // ms
	next   uint32 // in its set, or of those given back
	kind   uint8
	paid   bool // it was looked up, and counted as a hit of LRU, since it went
}

const (
	lostBit    = 1 << 31
	lostAPage  = 1 << 10
	headsAPage = 1 << 12
	minHeads   = 64 // a power of two
)

func (l *lost) at(id uint32) *lostBlock {
	i := id &^ lostBit
	return &l.pages[i/lostAPage][i%lostAPage]
}

func (l *lost) head(set uint) *uint32 { return &l.heads[set/headsAPage][set%headsAPage] }

// find is the number of a block, 0 if it is not lost.
func (l *lost) find(print uint64) uint32 {
	if l.blocks == 0 {
		return 0
	}
	id := *l.head(l.home(print))
	for id != 0 && l.at(id).print != print {
		id = l.at(id).next
	}
	return id
}

// put adds a block that is not there.
func (l *lost) put(print uint64, kind uint8, used uint32) uint32 {
	l.grow()
	id := l.free
	if id != 0 {
		l.free = l.at(id).next
	} else {
		id = l.number()
	}
	head := l.head(l.home(print))
	*l.at(id) = lostBlock{print: print, kind: kind, used: used, next: *head}
	*head = id
	l.blocks++
	return id
}

// number is one that was never given; 0 names no block.
func (l *lost) number() uint32 {
	l.made++
	if int(l.made/lostAPage) >= len(l.pages) {
		l.pages = append(l.pages, new([lostAPage]lostBlock))
	}
	return l.made | lostBit
}

func (l *lost) remove(id uint32) {
	b := l.at(id)
	at := l.head(l.home(b.print))
	for *at != id {
		at = &l.at(*at).next
	}
	*at = b.next
	b.next, l.free = l.free, id
	l.blocks--
}

// grow has as many sets as blocks.
func (l *lost) grow() {
	switch {
	case l.sets == 0:
		l.heads = append(l.heads, new([headsAPage]uint32))
		l.sets, l.half = minHeads, minHeads
	case l.blocks >= int(l.sets):
		if l.sets == uint(len(l.heads))*headsAPage {
			l.heads = append(l.heads, new([headsAPage]uint32))
		}
		l.split()
	}
}

func (l *lost) split() {
	from, to := l.head(l.next()), l.head(l.sets)
	id := *from
	*from = 0
	for id != 0 {
		b := l.at(id)
		half, next := to, b.next
		if l.stays(b.print) {
			half = from
		}
		*half, b.next, id = id, *half, next
	}
	l.divided()
}

func (l *lost) bytes() int64 {
	return int64(len(l.pages))*int64(unsafe.Sizeof([lostAPage]lostBlock{})+unsafe.Sizeof(&l.pages[0])) +
		int64(len(l.heads))*int64(unsafe.Sizeof([headsAPage]uint32{})+unsafe.Sizeof(&l.heads[0]))
}
