package dram

import "github.com/kvagent/kvagent/pool/dram/arena"

// These methods write the state of a slot to the pool's file. The order matters: a header is
// written after the bytes and before the slot is reported stored; it is cleared before the slot can
// be given to another entry.

// header returns the file's header of a used slot.
func (c *core) header(slot uint32) *arena.Header { return c.file.Header(c.slabs.Cell(slot)) }

// persistShard writes the header of a shard whose bytes are complete.
func (c *core) persistShard(e, slot uint32, shard uint8, sum uint32) {
	if c.file == nil {
		return
	}
	r := &c.recs.All[e]
	sp := c.realms[r.ident.realm()].space
	if sp.record == noRecord {
		return
	}
	c.file.Touch(func() {
		h := c.header(slot)
		h.Hash, h.HashLen, h.Generation = r.hash.Words(), r.ident.hashLen(), sp.generation
		h.SetPlace(sp.record, r.ident.group(), shard)
		h.Length, h.Sum = sp.spec.Groups[r.ident.group()].ShardBytes[shard], sum
		h.Used.Store(c.file.Tick)
		h.Check.Store(h.SumOf(slot))
	})
}

// clearHeaders marks the slots of an entry as free in the file.
func (c *core) clearHeaders(e uint32) {
	if c.file == nil {
		return
	}
	slot := c.recs.All[e].head
	for range c.group(c.recs.All[e].ident).classes {
		c.file.Touch(func() { c.header(slot).Check.Store(0) })
		slot = c.slabs.At(slot).Link
	}
}

// persistParent writes the parent of e; none clears it.
func (c *core) persistParent(e, parent uint32) {
	if c.file == nil {
		return
	}
	var w uint64
	if parent != none {
		p := &c.recs.All[parent]
		w = arena.ParentOf(p.head, p.hash.Tag())
	}
	c.file.Touch(func() { c.header(c.recs.All[e].head).Parent.Store(w) })
}

// persistMove copies a moved shard's header to its new slot. Until the old one is cleared both are
// valid and alike, and the next process may use either. The children of the entry are updated to
// its new place. The old header is cleared in a Touch of its own, even if the new one cannot be
// written: its slot is given to another entry.
func (c *core) persistMove(e uint32, m *move) {
	f := c.file
	if f == nil {
		return
	}
	old, h := c.header(m.slot), c.header(m.to)
	f.Touch(func() {
		h.Parent.Store(old.Parent.Load())
		h.Used.Store(old.Used.Load())
		if old.Check.Load() == 0 {
			return
		}
		h.Hash, h.HashLen = old.Hash, old.HashLen
		h.CopyPlace(old)
		h.Generation, h.Length, h.Sum = old.Generation, old.Length, old.Sum
		h.Check.Store(h.SumOf(m.to))
	})
	if m.shard == 0 {
		c.persistChildren(e)
	}
	f.Touch(func() { old.Check.Store(0) })
}

// persistChildren writes the place of an entry to the headers of its children.
func (c *core) persistChildren(e uint32) {
	child := c.recs.All[e].child
	for n := 0; child != none && n < maxMoveChildren; n++ {
		c.persistParent(child, e)
		child = c.recs.All[child].next
	}
}

// persistUse writes that e was loaded.
func (c *core) persistUse(e uint32) {
	if f := c.file; f != nil {
		f.Touch(func() { c.header(c.recs.All[e].head).Used.Store(f.Tick) })
	}
}

// tick sets the clock that persistShard and persistUse write.
func (c *core) tick() {
	if f := c.file; f != nil {
		f.SetTime(c.now())
	}
}

// advanceGeneration starts a new generation of a space in the file. Nothing stored before is
// restored.
func (c *core) advanceGeneration(sp *space) {
	if f := c.file; f != nil && sp.record != noRecord {
		if !f.Touch(func() { sp.generation = f.SpaceAt(sp.record).Turn() }) {
			sp.record = noRecord // its record is lost, with everything stored under it
		}
	}
}

// noRecord marks a space without a record in the file.
const noRecord = -1

// persistSpace assigns an opened space a record in the file. A space without one, for
// which there is no room, works, and ends with the process (Options.SpaceNotKept).
func (c *core) persistSpace(sp *space) {
	sp.record = noRecord
	f := c.file
	if f == nil {
		return
	}
	b, fits := arena.EncodeSpec(&sp.spec)
	if !fits {
		return
	}
	n, ok := f.FreeRecord()
	if !ok {
		if n, ok = c.forgetUnopened(); !ok {
			return
		}
	}
	if f.Touch(func() {
		r := f.SpaceAt(n)
		sp.generation = r.Turn()
		r.Write(b)
	}) {
		sp.record = n
	}
}

// forgetUnopened frees the record of a space that has no entries and has not been opened in this
// process.
func (c *core) forgetUnopened() (n int, ok bool) {
	for print, sp := range c.unopened {
		if c.realms[sp.realm].entries > 0 {
			continue
		}
		delete(c.unopened, print)
		c.end(sp.realm)
		return sp.record, true
	}
	return 0, false
}
