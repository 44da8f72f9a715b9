package dram

// list links records by newer and older. A record is in at most one list, which its flag names.
type list struct {
	flag           uint32
	newest, oldest uint32
	n              int
}

// push adds e as the newest.
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

// pushBelow inserts e just older than at, which is in the list.
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

// pushAbove inserts e just newer than at, which is in the list.
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

// cursor is the position in the recent list of the last entry of a chain. The next one is inserted
// just below it, so a suffix is always older than its prefix. It stays valid while the lock is
// released.
type cursor struct{ entry, generation uint32 }

// touch makes e the most recent but for the chain before it, and moves the cursor to it.
func (c *core) touch(e uint32, at *cursor) {
	recs := c.recs.All
	if recs[e].is(flagUntouched | unused) {
		recs[e].hold &^= flagUntouched | unused
	}
	if !recs[e].is(flagRecent) {
		return
	}
	above := c.above(at)
	if recs[e].is(flagOwned) {
		c.owners.Use(e, above)
	}
	if above == e || (above != none && recs[above].older == e) {
		at.entry, at.generation = e, c.states.All[e].generation
		return
	}
	c.recent.remove(recs, e)
	c.place(e, above)
	at.entry, at.generation = e, c.states.All[e].generation
}

// enter inserts an entry that just became visible or unpinned into the recent list.
func (c *core) enter(e uint32, at *cursor) {
	c.place(e, c.above(at))
	at.entry, at.generation = e, c.states.All[e].generation
}

func (c *core) place(e, above uint32) {
	if above == none {
		c.recent.push(c.recs.All, e)
		return
	}
	c.recent.pushBelow(c.recs.All, above, e)
}

// above returns the entry of the cursor, if it is still in the list.
func (c *core) above(at *cursor) uint32 {
	if at.entry == none || c.states.All[at.entry].generation != at.generation || !c.recs.All[at.entry].is(flagRecent) {
		return none
	}
	return at.entry
}
