package dram

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/advisor"
)

// Prefix implements pool.Index.
func (p *Pool) Prefix(s pool.SpaceID, group uint8, h pool.Hashes) int {
	at := trail{note: p.advisor.Begin()}
	n := 0
	for n < h.N {
		to := min(n+lockStride, h.N)
		found := p.prefix(&at, s, group, &h, n, to)
		n += found
		if n < to {
			break
		}
	}
	addRest(at.note, &p.core.seed, &h, n)
	p.advisor.End(at.note)
	return n
}

// trail is the state of a walk along a chain while the lock is released.
type trail struct {
	before pool.Ref // the entry before the next one
	recent cursor
	note   *advisor.Note // nil without a policy
}

func (p *Pool) prefix(at *trail, s pool.SpaceID, group uint8, h *pool.Hashes, from, to int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	id, sp, ok := c.identOf(s, group, h.Len)
	if !ok {
		return 0
	}
	describe(at.note, id, &sp.groups[group])
	c.work.steps = maxSteps
	v := c.walk(h)
	before := c.lookupRef(at.before)
	for i := from; i < to; {
		n := min(groupLen, to-i)
		c.look(id, &v, i, n)
		for j, e := range c.probe.entry[:n] {
			if e == none {
				addFound(at.note, &c.seed, &c.probe, n, j)
				return i - from
			}
			c.relink(e, before)
			c.touch(e, &at.recent)
			before = e
			i++
		}
		addFound(at.note, &c.seed, &c.probe, n, n)
	}
	at.before = c.ref(before)
	return to - from
}

// relink links an entry of a chain to the one before it, if it has no link.
func (c *core) relink(e, before uint32) {
	if before != none && c.recs.All[e].prev == none {
		c.link(e, before)
	}
}

// Exists implements pool.Index.
func (p *Pool) Exists(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) {
	for from := 0; from < h.N; from += lockStride {
		p.exists(s, group, &h, from, present[from:min(from+lockStride, h.N)])
	}
}

func (p *Pool) exists(s pool.SpaceID, group uint8, h *pool.Hashes, from int, present []bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	id, _, ok := c.identOf(s, group, h.Len)
	if !ok {
		clear(present)
		return
	}
	v := c.walk(h)
	for i := 0; i < len(present); i += groupLen {
		n := min(groupLen, len(present)-i)
		c.look(id, &v, from+i, n)
		for j, e := range c.probe.entry[:n] {
			present[i+j] = e != none
		}
	}
}

// Pin implements pool.Index.
func (p *Pool) Pin(
	s pool.SpaceID, group uint8, h pool.Hashes, maxBytes int64, refs []pool.Ref,
) (int, []pool.Ref, int64) {
	n, bytes := 0, int64(0)
	note := p.advisor.Begin()
	for n < h.N {
		to := min(n+lockStride, h.N)
		found, each := p.pin(note, s, group, &h, n, to, maxBytes-bytes, &refs)
		n += found
		bytes += int64(found) * each
		if n < to {
			break
		}
	}
	addRest(note, &p.core.seed, &h, n)
	p.advisor.End(note)
	return n, refs, bytes
}

// pin pins a part of a chain, and returns the number pinned and the bytes of each.
func (p *Pool) pin(
	note *advisor.Note, s pool.SpaceID, group uint8, h *pool.Hashes, from, to int, maxBytes int64, refs *[]pool.Ref,
) (n int, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	id, sp, ok := c.identOf(s, group, h.Len)
	if !ok {
		return 0, 0
	}
	describe(note, id, &sp.groups[group])
	bytes = sp.groups[group].bytes
	if room := maxBytes / bytes; room < int64(to-from) {
		to = from + int(max(room, 0))
	}
	c.work.steps = maxSteps
	v := c.walk(h)
	before := uint32(none)
	if len(*refs) > 0 && from > 0 {
		before = c.lookupRef((*refs)[len(*refs)-1])
	}
	for i := from; i < to; {
		k := min(groupLen, to-i)
		c.look(id, &v, i, k)
		for j, e := range c.probe.entry[:k] {
			if e == none || c.recs.All[e].pins() == maxPins {
				addFound(note, &c.seed, &c.probe, k, j)
				return i - from, bytes
			}
			c.relink(e, before)
			c.pinEntry(e, bytes)
			*refs = append(*refs, c.ref(e))
			before = e
			i++
		}
		addFound(note, &c.seed, &c.probe, k, k)
	}
	return to - from, bytes
}

// Unpin implements pool.Index.
func (p *Pool) Unpin(refs []pool.Ref) {
	var at cursor
	for from := 0; from < len(refs); from += lockStride {
		p.unpin(refs[from:min(from+lockStride, len(refs))], &at)
	}
}

func (p *Pool) unpin(refs []pool.Ref, at *cursor) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.core.tick()
	for _, ref := range refs {
		if e, ok := p.core.deref(ref); ok {
			p.core.unpinEntry(e, at)
		}
	}
}

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
