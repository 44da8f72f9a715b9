package dram

import (
	"github.com/kvagent/kvagent/pool"
)

// locked calls do under the lock if the pool is open, and reports whether it is.
func (p *Pool) locked(do func(c *core)) (open bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		do(p.core)
	}
	return !p.closed
}

// strides calls do under the lock for each part of n hashes, and releases the lock between two. In
// a closed pool do finds nothing.
func (p *Pool) strides(n int, do func(c *core, from, to int)) {
	for from := 0; from < n; from += lockStride {
		func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			do(p.core, from, min(from+lockStride, n))
		}()
	}
}

// Prefix implements pool.Index.
func (p *Pool) Prefix(s pool.SpaceID, group uint8, h pool.Hashes) int {
	var t trail
	return p.pass(&t, s, group, &h)
}

// Pin implements pool.Index.
func (p *Pool) Pin(
	s pool.SpaceID, group uint8, h pool.Hashes, maxBytes int64, refs []pool.Ref,
) (int, []pool.Ref, int64) {
	t := trail{pins: true, room: maxBytes, refs: refs}
	n := p.pass(&t, s, group, &h)
	return n, t.refs, maxBytes - t.room
}

// trail is the state of a walk along a chain while the lock is released.
type trail struct {
	before pool.Ref // the entry before the next one
	recent cursor
	note   *pool.Note // nil without an advisor

	pins bool // entries are pinned, too
	room int64
	each int64 // bytes of an entry
	refs []pool.Ref
}

// pass walks along a chain to its first entry that is not stored, or cannot be pinned, and returns
// how many are before it.
func (p *Pool) pass(t *trail, s pool.SpaceID, group uint8, h *pool.Hashes) (n int) {
	if p.advisor != nil {
		t.note = p.advisor.Begin()
	}
	for n < h.N {
		to := min(n+lockStride, h.N)
		found := p.passPart(t, s, group, h, n, to)
		n += found
		t.room -= int64(found) * t.each
		if n < to {
			break
		}
	}
	if t.note != nil {
		addRest(t.note, &p.core.seed, h, n)
		p.advisor.End(t.note)
	}
	return n
}

func (p *Pool) passPart(t *trail, s pool.SpaceID, group uint8, h *pool.Hashes, from, to int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	id, sp, ok := c.identOf(s, group, h.Len)
	if !ok {
		return 0
	}
	describe(t.note, id, &sp.groups[group])
	t.each = sp.groups[group].bytes
	if room := max(t.room, 0) / t.each; t.pins && room < int64(to-from) {
		to = from + int(room)
	}
	c.work.steps = maxSteps
	c.probe.next = none
	before := c.lookupRef(t.before)
	for i := from; i < to; {
		n := min(groupLen, to-i)
		c.look(id, h, i, n)
		for j, e := range c.probe.entry[:n] {
			if e == none || t.pins && c.recs.All[e].pins() == maxPins {
				addFound(t.note, &c.seed, &c.probe, n, j)
				return i - from
			}
			c.relink(e, before)
			c.touch(e, &t.recent)
			if t.pins {
				c.pin(e, t.each)
				t.refs = append(t.refs, c.ref(e))
			}
			before = e
			i++
		}
		addFound(t.note, &c.seed, &c.probe, n, n)
	}
	t.before = c.ref(before)
	return to - from
}

// relink links an entry of a chain to the one before it, if it has no link.
func (c *core) relink(e, before uint32) {
	if before != none && c.recs.All[e].prev == none {
		c.link(e, before)
	}
}

// each calls do for each group of hashes, from index i on, with their visible entries or none, and
// holds the lock meanwhile. Where the space is not known it calls nothing.
func (p *Pool) each(s pool.SpaceID, group uint8, h *pool.Hashes, do func(c *core, sp *space, i int, found []uint32)) {
	p.strides(h.N, func(c *core, from, to int) {
		id, sp, ok := c.identOf(s, group, h.Len)
		c.probe.next = none
		for ; ok && from < to; from += groupLen {
			n := min(groupLen, to-from)
			c.look(id, h, from, n)
			do(c, sp, from, c.probe.entry[:n])
		}
	})
}

// Exists implements pool.Index.
func (p *Pool) Exists(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) {
	clear(present[:h.N])
	p.each(s, group, &h, func(_ *core, _ *space, i int, found []uint32) {
		for j, e := range found {
			present[i+j] = e != none
		}
	})
}

// Unpin implements pool.Index.
func (p *Pool) Unpin(refs []pool.Ref) {
	p.strides(len(refs), func(c *core, from, to int) {
		c.tick()
		for _, ref := range refs[from:to] {
			if e, ok := c.deref(ref); ok && c.unpin(e) && c.file != nil {
				c.file.Touch(func() { c.header(c.recs.All[e].head).Used.Store(c.file.Tick) })
			}
		}
	})
}

// list links records by newer and older. A record is in at most one list, which its flag names.
type list struct {
	flag           uint32
	newest, oldest uint32
	n              int
}

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
type cursor struct{ entry, serial uint32 }

// touch makes e the most recent but for the chain before it, and moves the cursor to it.
func (c *core) touch(e uint32, at *cursor) {
	recs := c.recs.All
	if recs[e].is(unused) {
		recs[e].hold &^= unused
	}
	if !recs[e].is(flagRecent) {
		return
	}
	above := c.above(at)
	if recs[e].is(flagOwned) {
		c.owners.use(e, above)
	}
	if above == e || (above != none && recs[above].older == e) {
		at.entry, at.serial = e, c.states.All[e].serial
		return
	}
	c.recent.remove(recs, e)
	c.place(e, above)
	at.entry, at.serial = e, c.states.All[e].serial
}

// enter inserts an entry that just became visible into the recent list.
func (c *core) enter(e uint32, at *cursor) {
	c.place(e, c.above(at))
	at.entry, at.serial = e, c.states.All[e].serial
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
	if at.entry == none || c.states.All[at.entry].serial != at.serial || !c.recs.All[at.entry].is(flagRecent) {
		return none
	}
	return at.entry
}
