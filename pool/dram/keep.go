package dram

import "github.com/kvagent/kvagent/pool"

var _ pool.Keeper = (*Pool)(nil)

// PinEach implements pool.Keeper.
func (p *Pool) PinEach(s pool.SpaceID, group uint8, h pool.Hashes, refs []pool.Ref) (all []pool.Ref, bytes int64) {
	p.eachVisible(s, group, &h, func(c *core, e uint32, each int64) {
		if c.recs.All[e].pins() < maxPins {
			c.pinEntry(e, each)
			refs, bytes = append(refs, c.ref(e)), each
		}
	})
	return refs, bytes
}

// MarkBrief implements pool.Keeper.
func (p *Pool) MarkBrief(s pool.SpaceID, group uint8, h pool.Hashes) {
	p.eachVisible(s, group, &h, func(c *core, e uint32, _ int64) {
		c.recs.All[e].hold = c.recs.All[e].hold&^flagDue | flagBrief
	})
}

// DropBrief implements pool.Keeper. It goes from the ends of chains to their starts, in whichever
// order the hashes are.
func (p *Pool) DropBrief(s pool.SpaceID, group uint8, h pool.Hashes) (dropped int) {
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
