package dram

import (
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// PinEach implements pool.Advised.
func (p *Pool) PinEach(s pool.SpaceID, group uint8, h pool.Hashes, refs []pool.Ref) (all []pool.Ref, bytes int64) {
	p.eachVisible(s, group, &h, func(c *core, e uint32, each int64) {
		if c.recs.All[e].pins() < maxPins {
			c.recs.All[e].hold &^= unused
			c.pin(e, each)
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
		r := &c.recs.All[e]
		r.hold |= mark
		if brief {
			r.hold &^= flagDue
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

// Advise implements pool.Advised. The policy may remember blocks that are not stored, such as those
// that it refused; it ignores entries that have left meanwhile.
func (p *Pool) Advise(s pool.SpaceID, group uint8, h pool.Hashes, a pool.Advice, lasts time.Duration) {
	if p.advisor == nil {
		return
	}
	var named, chain advised // chain is from the end of the part before
	var first pool.Ref
	p.each(s, group, &h, func(c *core, sp *space, i int, found []uint32) {
		id := makeIdent(sp.realm, group, h.Len)
		named.entries = append(named.entries, found...)
		for j, e := range found {
			if e != none && first == 0 {
				first = c.ref(e)
			}
			named.prints = append(named.prints, c.seed.Hash(uint32(id), offheap.KeyOf(h.At(i+j))))
		}
	})
	for more := lasts == 0; more && len(chain.entries) < maxAdvised; {
		first, more = p.before(first, &chain)
	}
	slices.Reverse(chain.entries)
	slices.Reverse(chain.prints)
	a.Entries, a.Prints = append(chain.entries, named.entries...), append(chain.prints, named.prints...)
	if len(a.Entries) > 0 {
		p.advisor.Advise(&a, lasts)
	}
}

// advised is what an advice is about.
type advised struct {
	entries []uint32
	prints  []uint64
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
			r := &c.recs.All[e]
			a.entries, a.prints = append(a.entries, e), append(a.prints, c.seed.Hash(uint32(r.ident), r.hash))
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
		inUse := r.pins() > 0 && !r.is(flagRead) // reading for a tier is no use
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

// eachVisible calls do for each of the hashes that is stored, with the bytes of one.
func (p *Pool) eachVisible(s pool.SpaceID, group uint8, h *pool.Hashes, do func(c *core, e uint32, bytes int64)) {
	p.each(s, group, h, func(c *core, sp *space, _ int, found []uint32) {
		for _, e := range found {
			if e != none {
				do(c, e, sp.groups[group].bytes)
			}
		}
	})
}

// Child implements pool.View.
func (c *core) Child(e uint32) uint32 { return c.recs.All[e].child }

// Held implements pool.View.
func (c *core) Held(e uint32) bool { return c.held(e) }

// kindOf returns the kind of entries with slots of these classes, a new one if necessary. Once
// there are MaxKinds, all further ones share the last.
func (c *core) kindOf(classes []int32) uint8 {
	for i, k := range c.kinds {
		if slices.Equal(k, classes) {
			return uint8(i)
		}
	}
	if len(c.kinds) < pool.MaxKinds {
		c.kinds = append(c.kinds, classes)
	}
	return uint8(len(c.kinds) - 1)
}

// kindsWith returns the kinds, a bit each, whose entries have a slot of a class.
func (c *core) kindsWith(class int32) (kinds uint64) {
	for i, k := range c.kinds {
		if i == pool.MaxKinds-1 || slices.Contains(k, class) {
			kinds |= 1 << i
		}
	}
	return kinds
}

// advised returns the entry with a slot of a class that the policy evicts; none without a policy,
// or if it refuses the block that the slot is for.
func (c *core) advised(class int32) uint32 {
	if c.advisor == nil {
		return none
	}
	e := c.advisor.Victim(c.kindsWith(class), c.incoming, c)
	if e == pool.Refused {
		c.refused = true
		return none
	}
	if e != none && !c.evictable(e) {
		panic("dram: the policy evicts an entry that is held or has children")
	}
	return e
}

// announce passes the entries that became visible to the policy.
func (c *core) announce() {
	if c.advisor == nil || len(c.shown) == 0 {
		return
	}
	from := 0
	c.advisor.Insert(func(in *pool.Insertion) (more bool) {
		from = c.announceRun(in, from)
		return from < len(c.shown)
	})
	c.shown = c.shown[:0]
}

// announceRun describes the entries of one group from an index on, and returns the one after them.
func (c *core) announceRun(in *pool.Insertion, from int) int {
	id := c.recs.All[c.shown[from]].ident
	g := c.group(id)
	in.Kind, in.BlockTokens = g.kind, g.tokens
	in.Entries, in.Prints, in.Parent = in.Entries[:0], in.Prints[:0], c.parent(c.shown[from])
	for ; from < len(c.shown); from++ {
		r := &c.recs.All[c.shown[from]]
		if r.ident != id {
			break
		}
		if !r.is(flagVisible) {
			continue
		}
		in.Entries, in.Prints = append(in.Entries, c.shown[from]), append(in.Prints, c.seed.Hash(uint32(id), r.hash))
	}
	return from
}

func describe(n *pool.Note, id ident, g *group) {
	if n != nil {
		n.ID, n.Use.BlockTokens = uint32(id), g.tokens
	}
}

// addFound adds a group of blocks that were looked up, up to the first that is not stored.
func addFound(n *pool.Note, s *offheap.Seed, pr *probe, looked, stored int) {
	if n == nil || len(n.Use.Prints) >= pool.MaxNoteBlocks {
		return
	}
	n.Use.Entries = append(n.Use.Entries, pr.entry[:stored]...)
	for i := range stored {
		n.Use.Prints = append(n.Use.Prints, s.Hash(n.ID, pr.key[i]))
	}
	n.Missed = stored < looked && pr.entry[stored] == none
}

// addRest adds the blocks from an index on, if the one there was missed. It needs no lock.
func addRest(n *pool.Note, s *offheap.Seed, h *pool.Hashes, from int) {
	if !n.Missed {
		return
	}
	for i := from; i < h.N && len(n.Use.Prints) < pool.MaxNoteBlocks; i++ {
		n.Use.Prints = append(n.Use.Prints, s.Hash(n.ID, offheap.KeyOf(h.At(i))))
	}
}
