package events

// cursor is where a subscriber is in one ledger.
type cursor struct {
	scan uint32 // block to look at next; 0: it has seen all of them
	seen uint64 // changes from this number on are to be looked at, after the scan
}

// begin starts a cursor that has been told nothing.
func (l *ledger) begin(c *cursor) { c.scan, c.seen = 1, l.first+uint64(len(l.log)) }

// withdraw makes a subscriber one that has been told nothing.
func (l *ledger) withdraw(bit uint64) {
	for n := uint32(1); n < l.high; n++ {
		if b := l.at(n); b.toldTo(bit) != 0 {
			for m := range b.told {
				b.told[m] &^= bit
			}
			l.rest(n)
		}
	}
}

// take adds to a batch what a subscriber is to be told next, and reports whether that is all. A
// block is told stored after those before it in its chain, and removed after those that follow it.
func (l *ledger) take(c *cursor, bit uint64, out *batch) (all bool) {
	if c.seen < l.first { // the log does not reach back as far
		l.gaps++
		l.begin(c)
	}
	for ; c.scan != 0; c.scan++ {
		if c.scan >= l.high {
			c.scan = 0
			break
		}
		if !l.settle(c.scan, bit, out) {
			return false
		}
	}
	for ; c.seen < l.first+uint64(len(l.log)); c.seen++ {
		if !l.settle(l.log[c.seen-l.first], bit, out) {
			return false
		}
	}
	return true
}

// settle tells a subscriber what has become of one block. It returns false if the batch is full
// before that. The blocks that a subscriber was told are stored always form whole chains from their
// roots.
func (l *ledger) settle(n uint32, bit uint64, out *batch) bool {
	if !out.look() {
		return false
	}
	b := l.at(n)
	switch told := b.toldTo(bit); {
	case told == b.wanted():
		return true
	case b.wanted() == 0:
		return l.tellRemoved(n, bit, out)
	}
	return l.tellStored(n, bit, out) && l.tellLeft(n, bit, out)
}

// tellStored tells where a block is, after those before it.
func (l *ledger) tellStored(n uint32, bit uint64, out *batch) bool {
	path := append(l.path[:0], n)
	for b := l.at(n); !b.is(flagRoot) && l.at(b.parent).toldTo(bit) == 0; b = l.at(b.parent) {
		path = append(path, b.parent)
	}
	l.path = path
	for i := len(path) - 1; i >= 0; i-- {
		b := l.at(path[i])
		for m := range b.told {
			if b.wanted()&^b.toldTo(bit)&(1<<m) != 0 {
				if !out.stored(l, path[i], m) {
					return false
				}
				b.told[m] |= bit
			}
		}
	}
	return true
}

// tellLeft tells which media a block has left.
func (l *ledger) tellLeft(n uint32, bit uint64, out *batch) bool {
	b := l.at(n)
	for m := range b.told {
		if b.toldTo(bit)&^b.wanted()&(1<<m) != 0 {
			if !out.removed(l, n, m) {
				return false
			}
			b.told[m] &^= bit
		}
	}
	return true
}

// tellRemoved goes down to a block with no told one after it, and from there on up, so an answer
// that takes a part of many blocks looks at no more of them than that part and what leads to it.
func (l *ledger) tellRemoved(n uint32, bit uint64, out *batch) bool {
	path := append(l.path[:0], n)
	child := l.nextTold(l.at(n).child, bit, out)
	for len(path) > 0 {
		if child != 0 {
			path = append(path, child)
			child = l.nextTold(l.at(child).child, bit, out)
			continue
		}
		last := path[len(path)-1]
		if !l.tellLeft(last, bit, out) {
			break
		}
		if path = path[:len(path)-1]; len(path) > 0 {
			child = l.nextTold(l.at(last).next, bit, out)
		}
		l.rest(last) // which forgets none that is told of
	}
	l.path = path
	return len(path) == 0
}

// nextTold returns the first of a block's later siblings, itself among them, that a subscriber was
// told is stored; 0: none.
func (l *ledger) nextTold(n uint32, bit uint64, out *batch) uint32 {
	for ; n != 0 && l.at(n).toldTo(bit) == 0; n = l.at(n).next {
		out.looks--
	}
	return n
}
