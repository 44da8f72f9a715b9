package evict

// lost are the blocks that LRU would have and the pool gave up: no other block can be a hit of LRU and a miss of the pool.
type lost struct {
	linear
	heads   pages[uint32] // by set, the first of its blocks
	members pages[lostBlock]
	made    uint32 // numbers given so far
	free    uint32 // the first of those given back
	blocks  int
}

// lostBlock is one of them; their numbers have lostBit set, so that they can be members of a list with entries.
type lostBlock struct {
	low    uint32 // bits 0 to 31 of its print
	high   uint16 // bits 32 to 47
	kind   uint8
	paid   bool // it was looked up, and counted as a hit of LRU, since it went
	recent links
	used   uint32 // ms
	next   uint32 // in its set, or of those given back
}

// is says that a print is that of the block.
func (b *lostBlock) is(print uint64) bool {
	return b.low == uint32(print) && b.high == uint16(print>>32)
}

const (
	lostBit  = 1 << 31
	minHeads = 64 // a power of two
)

func (l *lost) at(id uint32) *lostBlock { return l.members.at(id &^ lostBit) }

func (l *lost) head(set uint) *uint32 { return l.heads.at(uint32(set)) }

// find is the number of a block, 0 if it is not lost.
func (l *lost) find(print uint64) uint32 {
	if l.blocks == 0 {
		return 0
	}
	id := *l.head(l.home(print))
	for id != 0 && !l.at(id).is(print) {
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
	*l.at(id) = lostBlock{low: uint32(print), high: uint16(print >> 32), kind: kind, used: used, next: *head}
	*head = id
	l.blocks++
	return id
}

// number is one that was never given; 0 names no block.
func (l *lost) number() uint32 {
	l.made++
	l.members.make(l.made)
	return l.made | lostBit
}

func (l *lost) remove(id uint32) {
	b := l.at(id)
	at := l.head(l.home(uint64(b.low)))
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
		l.heads.make(0)
		l.sets, l.half = minHeads, minHeads
	case l.blocks >= int(l.sets):
		l.heads.make(uint32(l.sets))
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
		if l.stays(uint64(b.low)) {
			half = from
		}
		*half, b.next, id = id, *half, next
	}
	l.divided()
}

func (l *lost) bytes() int64 {
	return l.members.bytes() + l.heads.bytes()
}
