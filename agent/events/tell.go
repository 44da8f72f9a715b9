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
		if b := l.at(n); b.told&bit != 0 {
			b.told &^= bit
			l.rest(n)
		}
	}
}

// take adds to a batch what a subscriber is to be told next, and reports whether that is all. A
// block is told stored after those before it in its chain, and removed after those that follow it.
func (l *ledger) take(c *cursor, bit uint64, out *batch) (all bool) {
	if c.seen < l.first { // the log does not reach back as far
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
	told := b.told&bit != 0
	switch {
	case told == b.is(flagReachable):
		return true
	case told:
		return l.tellRemoved(n, bit, out)
	}
	return l.tellStored(n, bit, out)
}

func (l *ledger) tellStored(n uint32, bit uint64, out *batch) bool {
	path := append(l.path[:0], n)
	for b := l.at(n); !b.is(flagRoot) && l.at(b.parent).told&bit == 0; b = l.at(b.parent) {
		path = append(path, b.parent)
	}
	l.path = path
	for i := len(path) - 1; i >= 0; i-- {
		if !out.stored(l, path[i]) {
			return false
		}
		l.at(path[i]).told |= bit
	}
	return true
}

func (l *ledger) tellRemoved(n uint32, bit uint64, out *batch) bool {
	path := append(l.path[:0], n)
	for i := 0; i < len(path); i++ { // parents before their children
		for child := l.at(path[i]).child; child != 0; child = l.at(child).next {
			if l.at(child).told&bit != 0 {
				path = append(path, child)
			}
		}
	}
	l.path = path
	for i := len(path) - 1; i >= 0; i-- {
		if !out.removed(l, path[i]) {
			return false
		}
		l.at(path[i]).told &^= bit
		l.rest(path[i])
	}
	return true
}
