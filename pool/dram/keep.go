package dram

// What the pool's file is told of a slot's life. The order matters: a header is written when the bytes are there and before
// anybody hears that they are stored; it is cleared before the slot can be given to another.

// header is what the file says of a slot in use.
func (c *core) header(slot uint32) *header { return c.file.header(c.slabs.cell(slot)) }

// keepShard makes a shard whose bytes are there one that outlives the process.
func (c *core) keepShard(e, slot uint32, shard uint8, sum uint32) {
	if c.file == nil {
		return
	}
	r := &c.recs.all[e]
	sp := c.realms[r.ident.realm()].space
	if sp.record == notKept {
		return
	}
	c.file.touch(func() {
		h := c.header(slot)
		h.hash, h.space, h.hashLen = r.hash.words(), uint16(sp.record), r.ident.hashLen()
		h.place, h.generation = r.ident.group()<<4|shard, sp.generation
		h.length, h.sum = sp.spec.Groups[r.ident.group()].ShardBytes[shard], sum
		h.used.Store(c.file.tick)
		h.check.Store(h.sumOf(slot))
	})
}

// unkeep makes the slots of an entry free ones for whoever opens the file next.
func (c *core) unkeep(e uint32) {
	if c.file == nil {
		return
	}
	slot := c.recs.all[e].head
	for range c.group(c.recs.all[e].ident).classes {
		c.file.touch(func() { c.header(slot).check.Store(0) })
		slot = c.slabs.at(slot).link
	}
}

// keepParent notes what e hangs on; parent none is nothing.
func (c *core) keepParent(e, parent uint32) {
	if c.file == nil {
		return
	}
	var w uint64
	if parent != none {
		p := &c.recs.all[parent]
		w = parentOf(p.head, p.hash.tag())
	}
	c.file.touch(func() { c.header(c.recs.all[e].head).parent.Store(w) })
}

// keepMove gives a moved shard's header to its new slot. Until the old one is cleared both are
// whole, and alike: whoever opens the file then takes either. What hangs on the entry is told where
// it is now. The old header is cleared in a touch of its own, also if the new one cannot be written:
// its slot is given to another entry.
func (c *core) keepMove(e uint32, m *move) {
	f := c.file
	if f == nil {
		return
	}
	old, h := c.header(m.slot), c.header(m.to)
	f.touch(func() {
		h.parent.Store(old.parent.Load())
		h.used.Store(old.used.Load())
		if old.check.Load() == 0 {
			return
		}
		h.hash, h.space, h.hashLen, h.place = old.hash, old.space, old.hashLen, old.place
		h.generation, h.length, h.sum = old.generation, old.length, old.sum
		h.check.Store(h.sumOf(m.to))
	})
	if m.shard == 0 {
		c.keepChildren(e)
	}
	f.touch(func() { old.check.Store(0) })
}

// keepChildren notes where the entry lies that others hang on.
func (c *core) keepChildren(e uint32) {
	child := c.recs.all[e].child
	for n := 0; child != none && n < maxMoveChildren; n++ {
		c.keepParent(child, e)
		child = c.recs.all[child].next
	}
}

// keepUse notes that e was loaded.
func (c *core) keepUse(e uint32) {
	if f := c.file; f != nil {
		f.touch(func() { c.header(c.recs.all[e].head).used.Store(f.tick) })
	}
}

// tick sets the clock of what keepShard and keepUse note.
func (c *core) tick() {
	if f := c.file; f != nil {
		f.at(c.now())
	}
}

// turnKept starts a new generation of a space: from here on nothing stored before comes back.
func (c *core) turnKept(sp *space) {
	if f := c.file; f != nil && sp.record != notKept {
		if !f.touch(func() { sp.generation = f.spaceAt(sp.record).turn() }) {
			sp.record = notKept // its record is lost, and what was stored under it
		}
	}
}

// notKept is the record of a space that the file has not.
const notKept = -1

// keepSpace gives a space that is opened a record of the file. Without one it works, and is gone with the process.
func (c *core) keepSpace(sp *space) {
	sp.record = notKept
	f := c.file
	if f == nil {
		return
	}
	b, fits := encodeSpec(&sp.spec)
	if !fits {
		return
	}
	n, ok := f.freeRecord()
	if !ok {
		if n, ok = c.forgetUnopened(); !ok {
			return
		}
	}
	if f.touch(func() {
		r := f.spaceAt(n)
		sp.generation = r.turn()
		r.write(b)
	}) {
		sp.record = n
	}
}

// forgetUnopened takes the record of a space that nobody opened since the file was, and of which nothing is stored.
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
