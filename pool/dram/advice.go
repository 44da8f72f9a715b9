package dram

import (
	"slices"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/advisor"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

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

// announceRun describes the entries of one group from index from on, and returns the index after
// them.
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

// describe sets what the blocks of a note are.
func describe(n *advisor.Note, id ident, g *group) {
	if n != nil {
		n.ID, n.Use.BlockTokens = uint32(id), g.tokens
	}
}

// addFound adds a group of blocks that were looked up, up to the first that is not stored.
func addFound(n *advisor.Note, s *offheap.Seed, pr *probe, looked, stored int) {
	if n == nil || len(n.Use.Prints) >= advisor.MaxNoteBlocks {
		return
	}
	n.Use.Entries = append(n.Use.Entries, pr.entry[:stored]...)
	for i := range stored {
		n.Use.Prints = append(n.Use.Prints, s.Hash(n.ID, pr.key[i]))
	}
	n.Missed = stored < looked && pr.entry[stored] == none
}

// addRest adds the blocks from index from on, if the one there was missed. It does not need the
// pool's lock.
func addRest(n *advisor.Note, s *offheap.Seed, h *pool.Hashes, from int) {
	if n == nil || !n.Missed {
		return
	}
	v := offheap.ViewOf(h)
	for i := from; i < h.N && len(n.Use.Prints) < advisor.MaxNoteBlocks; i++ {
		n.Use.Prints = append(n.Use.Prints, s.Hash(n.ID, v.At(i)))
	}
}
