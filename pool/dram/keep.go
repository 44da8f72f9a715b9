package dram

// What the pool's file is told of a slot's life. The order matters: a header is written when the bytes are there and before
// anybody hears that they are stored; it is cleared before the slot can be given to another.

// header is what the file says of a slot in use.
func (s *slabs) header(slot uint32) *header {
	return &s.file.headers[s.slab[slot>>s.slotBits].cells+slot&(1<<s.slotBits-1)]
}

// keepShard makes a shard whose bytes are there one that outlives the process.
func (c *core) keepShard(e, slot uint32, shard uint8, sum uint32) {
	if c.slabs.file == nil {
		return
	}
	r := &c.recs.all[e]
	sp := c.realms[r.ident.realm()].space
	if sp.record == notKept {
		return
	}
	c.slabs.file.touch(func() {
		h := c.slabs.header(slot)
		h.hash, h.space, h.hashLen = r.hash, uint16(sp.record), r.ident.hashLen()
		h.place, h.generation = r.ident.group()<<4|shard, sp.generation
		h.length, h.sum = sp.spec.Groups[r.ident.group()].ShardBytes[shard], sum
		h.used.Store(c.slabs.file.tick)
		h.check.Store(h.sumOf(slot))
	})
}

// unkeep makes the slots of an entry free ones for whoever opens the file next.
func (c *core) unkeep(e uint32) {
	if c.slabs.file == nil {
		return
	}
	slot := c.recs.all[e].head
	for range c.group(c.recs.all[e].ident).classes {
		c.slabs.file.touch(func() { c.slabs.header(slot).check.Store(0) })
		slot = c.slabs.at(slot).link
	}
}

// keepParent notes what e hangs on; parent none is nothing.
func (c *core) keepParent(e, parent uint32) {
	if c.slabs.file == nil {
		return
	}
	var w uint64
	if parent != none {
		p := &c.recs.all[parent]
		w = parentOf(p.head, &p.hash)
	}
	c.slabs.file.touch(func() { c.slabs.header(c.recs.all[e].head).parent.Store(w) })
}

// keepMove gives a moved shard's header to its new slot. Until the old one is cleared both are
// whole, and alike: whoever opens the file then takes either. What hangs on the entry is told where
// it is now. The old header is cleared in a touch of its own, also if the new one cannot be written:
// its slot is given to another entry.
func (c *core) keepMove(e uint32, m *move) {
	f := c.slabs.file
	if f == nil {
		return
	}
	old, h := c.slabs.header(m.slot), c.slabs.header(m.to)
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
	if f := c.slabs.file; f != nil {
		f.touch(func() { c.slabs.header(c.recs.all[e].head).used.Store(f.tick) })
	}
}

// tick sets the clock of what keepShard and keepUse note.
func (c *core) tick() {
	if f := c.slabs.file; f != nil {
		f.now(c.now())
	}
}

// slabAt is where the word of a slab is.
func (f *file) slabAt(n int32) int { return int(f.super.slabs-f.super.headers) + int(n)*slabWordBytes }

// assign notes that a slab is cut into slots, whose headers are all clear; false if there is no room for them.
func (f *file) assign(n int32, first, perSlab, slotBytes uint32) bool {
	if f == nil {
		return true
	}
	if !f.grow(int(first + perSlab)) {
		return false
	}
	f.touch(func() { word(f.meta, f.slabAt(n)).Store(slabWord(first, slotBytes)) })
	return true
}

// withdraw notes that a slab has no slots any more. All its headers are clear.
func (f *file) withdraw(n int32) {
	if f != nil {
		f.touch(func() { word(f.meta, f.slabAt(n)).Store(0) })
	}
}

// turnKept starts a new generation of a space: from here on nothing stored before comes back.
func (c *core) turnKept(sp *space) {
	if f := c.slabs.file; f != nil && sp.record != notKept {
		if !f.touch(func() { sp.generation = f.spaceAt(sp.record).turn() }) {
			sp.record = notKept // its record is lost, and what was stored under it
		}
	}
}
