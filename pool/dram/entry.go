package dram

// create makes an entry with slots for all its shards, evicting what it must, or none where nothing
// more can go, or where c.wanted says what must be done first without the lock.
func (c *core) create(id ident, b []byte, parent uint32) uint32 {
	classes := c.group(id).classes
	c.keep = parent
	head, ok := uint32(0), c.makeRoom(classes)
	c.keep = none
	if ok {
		head, ok = c.takeAll(classes)
	}
	if !ok {
		return none
	}
	e := c.newRecord()
	if e == none {
		c.giveAll(head, len(classes))
		return none
	}
	k := words(b)
	h := c.seed.hash(id, k)
	c.table.grow(c.hashes)
	if !c.table.put(h, e) {
		c.giveAll(head, len(classes))
		c.freeRecord(e)
		return none
	}
	r := &c.recs.all[e]
	r.hash, r.ident, r.hold, r.head = k, id, flagLive, head
	c.lastCell(head, len(classes)).link = e | upward
	c.keepParent(e, none)
	c.realms[id.realm()].entries++
	c.stats.Partial++
	if parent != none {
		c.link(e, parent)
	}
	return e
}

// takeAll takes a slot of each class, linked one to the next, or none at all.
func (c *core) takeAll(classes []int32) (head uint32, ok bool) {
	link := uint32(none | upward) // nobody's yet: whoever walks from a slot to its owner must see that
	for i := len(classes) - 1; i >= 0; i-- {
		slot, ok := c.slabs.take(classes[i])
		if !ok {
			c.giveAll(head, len(classes)-1-i)
			return 0, false
		}
		*c.slabs.at(slot) = cell{link: link}
		head, link = slot, slot
	}
	return head, true
}

func (c *core) giveAll(slot uint32, n int) {
	for range n {
		next := c.slabs.at(slot).link
		c.slabs.give(slot)
		slot = next
	}
}

func (c *core) lastCell(head uint32, shards int) *cell {
	_, last := c.shardCell(head, shards-1)
	return last
}

// shardCell is the slot of a shard and its cell.
func (c *core) shardCell(head uint32, shard int) (uint32, *cell) {
	at := c.slabs.at(head)
	for range shard {
		head = at.link
		at = c.slabs.at(head)
	}
	return head, at
}

// owner is the entry a slot in use belongs to; none while that is being created.
func (c *core) owner(slot uint32) uint32 {
	link := c.slabs.at(slot).link
	for link&upward == 0 {
		link = c.slabs.at(link).link
	}
	return link &^ upward
}

func (c *core) newRecord() uint32 {
	e := c.spare
	if e != none {
		c.spare = c.recs.all[e].older
	} else {
		e = c.high
		if !c.recs.grow(int(e)+1) || !c.lives.grow(int(e)+1) {
			return none
		}
		c.high++
	}
	c.recs.all[e] = record{}
	generation := c.lives.all[e].generation + 1
	if generation == 0 {
		generation = 1
	}
	c.lives.all[e] = life{generation: generation}
	return e
}

func (c *core) freeRecord(e uint32) {
	c.recs.all[e] = record{older: c.spare}
	c.spare = e
}

// settle does what follows from the end of a reservation or the last pin of e.
func (c *core) settle(e uint32, at *cursor) {
	r, l := &c.recs.all[e], &c.lives.all[e]
	switch {
	case r.pins() > 0 || l.writing != 0:
	case r.is(flagDropped):
		c.free(e)
	case r.is(flagVisible):
		c.enter(e, at)
	case l.present == c.group(r.ident).full:
		c.show(e)
		c.enter(e, at)
	case l.present == 0:
		c.drop(e)
	default:
		c.partialYoung.push(c.recs.all, e)
	}
}

func (c *core) show(e uint32) {
	c.recs.all[e].hold |= flagVisible
	c.stats.Partial--
	c.stats.Entries++
	if c.advisor != nil {
		c.shown = append(c.shown, e)
	}
}

// drop makes an entry unfindable at once; it is freed when nobody holds it. What hangs on it is orphaned.
func (c *core) drop(e uint32) {
	r := &c.recs.all[e]
	c.unkeep(e)
	c.table.remove(c.seed.hash(r.ident, r.hash), e)
	c.leaveLists(e)
	c.unlink(e)
	c.orphan(e)
	if r.is(flagVisible) {
		c.advisor.remove(e)
		c.stats.Entries--
	} else {
		c.stats.Partial--
	}
	r.hold = r.hold&^flagVisible | flagDropped
	if r.pins() == 0 && c.lives.all[e].writing == 0 {
		c.free(e)
	}
}

func (c *core) leaveLists(e uint32) {
	for _, l := range [...]*list{&c.recent, &c.partialYoung, &c.partialOld} {
		if c.recs.all[e].is(l.flag) {
			l.remove(c.recs.all, e)
		}
	}
}

func (c *core) free(e uint32) {
	r := &c.recs.all[e]
	c.giveAll(r.head, len(c.group(r.ident).classes))
	c.leaveRealm(r.ident.realm())
	c.freeRecord(e)
}

// pinEntry takes e out of the order of eviction; bytes is what all its slots hold.
func (c *core) pinEntry(e uint32, bytes int64) {
	r := &c.recs.all[e]
	if r.is(flagRecent) {
		c.recent.remove(c.recs.all, e)
	}
	if r.pins() == 0 {
		c.stats.PinnedEntries++
		c.stats.Pinned += bytes
	}
	r.hold = r.hold&^flagGlanced + onePin
}

func (c *core) unpinEntry(e uint32, at *cursor) {
	if c.recs.all[e].pins() > 0 && c.unhold(e) {
		c.keepUse(e)
		c.settle(e, at)
	}
}

// unhold takes a pin back, and says whether it was the last one.
func (c *core) unhold(e uint32) bool {
	r := &c.recs.all[e]
	r.hold -= onePin
	if r.pins() > 0 {
		return false
	}
	c.stats.PinnedEntries--
	c.stats.Pinned -= c.group(r.ident).bytes
	return true
}
