package dram

import "github.com/kvagent/kvagent/pool/dram/arena"

// What the pool's file is told of a slot's life. The order matters: a header is written when the
// bytes are there and before anybody hears that they are stored; it is cleared before the slot can
// be given to another.

// header is what the file says of a slot in use.
func (c *core) header(slot uint32) *arena.Header { return c.file.Header(c.slabs.Cell(slot)) }

// persistShard makes a shard whose bytes are there one that outlives the process.
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
		h.Hash, h.Space, h.HashLen = r.hash.words(), uint16(sp.record), r.ident.hashLen()
		h.Place, h.Generation = r.ident.group()<<4|shard, sp.generation
		h.Length, h.Sum = sp.spec.Groups[r.ident.group()].ShardBytes[shard], sum
		h.Used.Store(c.file.Tick)
		h.Check.Store(h.SumOf(slot))
	})
}

// clearHeaders makes the slots of an entry free ones for whoever opens the file next.
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

// persistParent notes what e hangs on; parent none is nothing.
func (c *core) persistParent(e, parent uint32) {
	if c.file == nil {
		return
	}
	var w uint64
	if parent != none {
		p := &c.recs.All[parent]
		w = arena.ParentOf(p.head, p.hash.tag())
	}
	c.file.Touch(func() { c.header(c.recs.All[e].head).Parent.Store(w) })
}

// persistMove gives a moved shard's header to its new slot. Until the old one is cleared both are
// whole, and alike: whoever opens the file then takes either. What hangs on the entry is told where
// it is now. The old header is cleared in a touch of its own, also if the new one cannot be
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
		h.Hash, h.Space, h.HashLen, h.Place = old.Hash, old.Space, old.HashLen, old.Place
		h.Generation, h.Length, h.Sum = old.Generation, old.Length, old.Sum
		h.Check.Store(h.SumOf(m.to))
	})
	if m.shard == 0 {
		c.persistChildren(e)
	}
	f.Touch(func() { old.Check.Store(0) })
}

// persistChildren notes where the entry lies that others hang on.
func (c *core) persistChildren(e uint32) {
	child := c.recs.All[e].child
	for n := 0; child != none && n < maxMoveChildren; n++ {
		c.persistParent(child, e)
		child = c.recs.All[child].next
	}
}

// persistUse notes that e was loaded.
func (c *core) persistUse(e uint32) {
	if f := c.file; f != nil {
		f.Touch(func() { c.header(c.recs.All[e].head).Used.Store(f.Tick) })
	}
}

// tick sets the clock of what persistShard and persistUse note.
func (c *core) tick() {
	if f := c.file; f != nil {
		f.SetTime(c.now())
	}
}

// advanceGeneration starts a new generation of a space: from here on nothing stored before comes back.
func (c *core) advanceGeneration(sp *space) {
	if f := c.file; f != nil && sp.record != noRecord {
		if !f.Touch(func() { sp.generation = f.SpaceAt(sp.record).Turn() }) {
			sp.record = noRecord // its record is lost, and what was stored under it
		}
	}
}

// noRecord is the record of a space that the file has not.
const noRecord = -1

// persistSpace gives a space that is opened a record of the file. Without one it works, and is gone
// with the process.
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

// forgetUnopened takes the record of a space that nobody opened since the file was, and of which
// nothing is stored.
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
