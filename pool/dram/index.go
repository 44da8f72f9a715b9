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
