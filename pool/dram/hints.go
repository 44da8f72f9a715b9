package dram

import (
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// PinEach implements pool.Advised.
func (p *Pool) PinEach(s pool.SpaceID, group uint8, h pool.Hashes, refs []pool.Ref) (all []pool.Ref, bytes int64) {
	p.eachVisible(s, group, &h, func(c *core, e uint32, each int64) {
		if c.recs.All[e].pins() < maxPins {
			c.pinEntry(e, each)
			refs, bytes = append(refs, c.ref(e)), each
		}
	})
	return refs, bytes
}

// MarkUnused implements pool.Advised.
func (p *Pool) MarkUnused(s pool.SpaceID, group uint8, h pool.Hashes, brief bool) {
	mark := uint32(flagUnused)
	if brief {
		mark |= flagBrief
	}
	p.eachVisible(s, group, &h, func(c *core, e uint32, _ int64) {
		c.recs.All[e].hold |= mark
		if brief {
			c.recs.All[e].hold &^= flagDue
		}
	})
}

// CountUnused implements pool.Advised.
func (p *Pool) CountUnused(s pool.SpaceID, group uint8, h pool.Hashes) (stored, unused int, bytes int64) {
	p.eachVisible(s, group, &h, func(c *core, e uint32, each int64) {
		stored, bytes = stored+1, each
		if c.recs.All[e].is(flagUnused) {
			unused++
		}
	})
	return stored, unused, bytes
}

// maxAdvised bounds the entries before those of one advice that are advised on, too.
const maxAdvised = 16 << 10

// Advise implements pool.Advised. The policy ignores entries that have left meanwhile.
func (p *Pool) Advise(s pool.SpaceID, group uint8, h pool.Hashes, a pool.Advice, lasts time.Duration) {
	if p.advisor == nil {
		return
	}
	var named advised
	var first pool.Ref
	p.eachVisible(s, group, &h, func(c *core, e uint32, _ int64) {
		if len(named.entries) == 0 {
			first = c.ref(e)
		}
		named.add(c, e)
	})
	if len(named.entries) == 0 {
		return
	}
	var chain advised // from the end of the part before
	for more := lasts == 0; more && len(chain.entries) < maxAdvised; {
		first, more = p.before(first, &chain)
	}
	slices.Reverse(chain.entries)
	slices.Reverse(chain.prints)
	a.Entries, a.Prints = append(chain.entries, named.entries...), append(chain.prints, named.prints...)
	p.advisor.Advise(&a, lasts)
}

// advised is what an advice is about.
type advised struct {
	entries []uint32
	prints  []uint64
}

func (a *advised) add(c *core, e uint32) {
	r := &c.recs.All[e]
	a.entries, a.prints = append(a.entries, e), append(a.prints, c.seed.Hash(uint32(r.ident), r.hash))
}

// before adds the entries before ref in their chain, the last one first, at most lockStride. It
// returns the last one that it added, and whether there may be more.
func (p *Pool) before(ref pool.Ref, a *advised) (last pool.Ref, more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	e := c.lookupRef(ref)
	for n := 0; e != none && n < lockStride; n++ {
		if e = c.parent(e); e != none {
			a.add(c, e)
			last = c.ref(e)
		}
	}
	return last, e != none
}

// DropUnused implements pool.Advised. It goes from the ends of chains to their starts, in whichever
// order the hashes are.
func (p *Pool) DropUnused(s pool.SpaceID, group uint8, h pool.Hashes) (dropped int) {
	var ends []pool.Ref
	p.eachVisible(s, group, &h, func(c *core, e uint32, _ int64) {
		if r := &c.recs.All[e]; r.is(flagBrief) {
			r.hold |= flagDue
			if r.child == none {
				ends = append(ends, c.ref(e))
			}
		}
	})
	for _, ref := range ends {
		for n := lockStride; n == lockStride; dropped += n {
			n, ref = p.dropDue(ref)
		}
	}
	return dropped
}

// dropDue drops an entry that is due and those before it, until one has to stay: n, of which at
// most lockStride. next is where to go on after so many.
func (p *Pool) dropDue(ref pool.Ref) (n int, next pool.Ref) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	e := c.lookupRef(ref)
	for ; n < lockStride && e != none; n++ {
		r := &c.recs.All[e]
		inUse := r.pins() > 0 && !r.is(flagUntouched) // reading for a tier is no use
		if !r.is(flagDue) || r.child != none || inUse {
			break
		}
		before := c.parent(e)
		c.drop(e, pool.ByTime)
		e = before
	}
	if e != none {
		next = c.ref(e)
	}
	return n, next
}

// eachVisible calls do for each of the hashes that is stored, with the bytes of one. The lock is
// held during a call, and released now and then between two.
func (p *Pool) eachVisible(s pool.SpaceID, group uint8, h *pool.Hashes, do func(c *core, e uint32, bytes int64)) {
	for from := 0; from < h.N; from += lockStride {
		p.visible(s, group, h, from, min(from+lockStride, h.N), do)
	}
}

func (p *Pool) visible(s pool.SpaceID, group uint8, h *pool.Hashes, from, to int,
	do func(c *core, e uint32, bytes int64)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	id, sp, ok := c.identOf(s, group, h.Len)
	for i := from; ok && i < to; i++ {
		if e := c.find(id, h.At(i)); e != none && c.recs.All[e].is(flagVisible) {
			do(c, e, sp.groups[group].bytes)
		}
	}
}
