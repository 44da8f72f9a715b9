package dram

// list threads records by newer and older. A record is in at most one list; its flag says in which.
type list struct {
	flag           uint32
	newest, oldest uint32
	n              int
}

// push puts e at the young end.
func (l *list) push(recs []record, e uint32) {
	r := &recs[e]
	r.newer, r.older = none, l.newest
	if l.newest != none {
		recs[l.newest].newer = e
	} else {
		l.oldest = e
	}
	l.newest = e
	r.hold |= l.flag
	l.n++
}

// pushBelow puts e just older than at, which is in the list.
func (l *list) pushBelow(recs []record, at, e uint32) {
	r, a := &recs[e], &recs[at]
	r.newer, r.older = at, a.older
	if a.older != none {
		recs[a.older].newer = e
	} else {
		l.oldest = e
	}
	a.older = e
	r.hold |= l.flag
	l.n++
}

// pushAbove puts e just newer than at, which is in the list.
func (l *list) pushAbove(recs []record, at, e uint32) {
	if newer := recs[at].newer; newer != none {
		l.pushBelow(recs, newer, e)
		return
	}
	l.push(recs, e)
}

func (l *list) remove(recs []record, e uint32) {
	r := &recs[e]
	if r.newer != none {
		recs[r.newer].older = r.older
	} else {
		l.newest = r.older
	}
	if r.older != none {
		recs[r.older].newer = r.newer
	} else {
		l.oldest = r.newer
	}
	r.newer, r.older = none, none
	r.hold &^= l.flag | flagLifted
	l.n--
}

// cursor is the place in the recent list that the last entry of a chain took: the next one goes
// just below, so that a suffix is always older than its prefix. It survives the lock being
// released.
type cursor struct{ entry, generation uint32 }

// touch makes e the youngest but for the chain before it, and moves the cursor to it.
func (c *core) touch(e uint32, at *cursor) {
	recs := c.recs.All
	if !recs[e].is(flagRecent) {
		recs[e].hold &^= flagUntouched
		return
	}
	above := c.above(at)
	if above == e || (above != none && recs[above].older == e) {
		at.entry, at.generation = e, c.lives.All[e].generation
		return
	}
	c.recent.remove(recs, e)
	c.place(e, above)
	at.entry, at.generation = e, c.lives.All[e].generation
}

// enter puts an entry that just became visible or unpinned into the recent list.
func (c *core) enter(e uint32, at *cursor) {
	c.place(e, c.above(at))
	at.entry, at.generation = e, c.lives.All[e].generation
}

func (c *core) place(e, above uint32) {
	if above == none {
		c.recent.push(c.recs.All, e)
		return
	}
	c.recent.pushBelow(c.recs.All, above, e)
}

// above is the entry of the cursor, if it still is where it was.
func (c *core) above(at *cursor) uint32 {
	if at.entry == none || c.lives.All[at.entry].generation != at.generation || !c.recs.All[at.entry].is(flagRecent) {
		return none
	}
	return at.entry
}
