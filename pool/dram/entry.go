package dram

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// create makes an entry with slots for all its shards, evicting as necessary. It returns none if
// nothing more can be evicted.
func (c *core) create(id ident, b []byte, parent uint32) uint32 {
	classes := c.group(id).classes
	c.keep = parent
	c.slabs.barren = false // the file may have room again
	head, ok := uint32(0), c.makeRoom(classes)
	if ok {
		head, ok = c.takeAll(classes)
	}
	if !ok && c.slabs.barren && c.makeRoom(classes) {
		head, ok = c.takeAll(classes)
	}
	c.keep = none
	if !ok {
		return none
	}
	e := c.newRecord()
	k := offheap.KeyOf(b)
	h := c.seed.Hash(uint32(id), k)
	c.table.Grow(c.hashes)
	if !c.table.Put(h, e) {
		c.giveAll(head)
		c.freeRecord(e)
		return none
	}
	r := &c.recs.All[e]
	r.hash, r.ident, r.hold, r.head = k, id, flagLive, head
	_, last := c.shardSlot(head, len(classes)-1)
	last.link = e | upward
	c.persistParent(e, none)
	c.realms[id.realm()].entries++
	c.stats.Partial++
	if parent != none {
		c.link(e, parent)
	}
	return e
}

// takeAll takes a slot of each class, each linked to the next, or none at all.
func (c *core) takeAll(classes []int32) (head uint32, ok bool) {
	link := uint32(none | upward) // no owner yet: a walk from a slot to its owner must see that
	for i := len(classes) - 1; i >= 0; i-- {
		slot, ok := c.slabs.take(classes[i])
		if !ok {
			c.giveAll(link)
			return 0, false
		}
		*c.slabs.at(slot) = slotShard{link: link}
		head, link = slot, slot
	}
	return head, true
}

// giveAll frees a slot and those linked to it.
func (c *core) giveAll(slot uint32) {
	for slot&upward == 0 {
		next := c.slabs.at(slot).link
		c.slabs.give(slot)
		slot = next
	}
}

func (c *core) shardSlot(head uint32, shard int) (uint32, *slotShard) {
	at := c.slabs.at(head)
	for range shard {
		head = at.link
		at = c.slabs.at(head)
	}
	return head, at
}

// owner returns the entry that a used slot belongs to; none while the entry is being created.
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
		c.spare = c.recs.All[e].older
	} else {
		e = c.high // within the regions: an entry has a slot
		c.high++
		c.recs.Use(int(c.high))
		c.states.Use(int(c.high))
	}
	c.recs.All[e] = record{}
	serial := max((c.states.All[e].serial+1)&^upward, 1) // the highest bit of a ref stays clear
	c.states.All[e] = recordState{serial: serial}
	return e
}

func (c *core) freeRecord(e uint32) {
	c.recs.All[e] = record{older: c.spare}
	c.spare = e
}

// settle updates the state of e after the end of a reservation.
func (c *core) settle(e uint32, at *cursor) {
	r, l := &c.recs.All[e], &c.states.All[e]
	switch {
	case l.writing != 0:
	case r.is(flagDropped):
		c.free(e)
	case l.present == c.group(r.ident).full:
		c.show(e)
		c.enter(e, at)
	case l.present == 0:
		c.drop(e, 0) // nothing of it was stored
	default:
		c.partial.push(c.recs.All, e)
	}
}

func (c *core) show(e uint32) {
	c.recs.All[e].hold |= flagVisible
	c.stats.Partial--
	c.stats.Entries++
	c.note(e)
	if c.advisor != nil {
		c.shown = append(c.shown, e)
	}
}

// drop makes an entry unfindable at once; it is freed once it is not held. Its children become
// roots. why is told to whoever asked for departures, but 0.
func (c *core) drop(e uint32, why pool.Cause) {
	r := &c.recs.All[e]
	if c.left != nil && why != 0 {
		c.depart(e, why)
	}
	c.clearHeaders(e)
	c.table.Remove(c.seed.Hash(uint32(r.ident), r.hash), e)
	c.leaveLists(e)
	if r.is(flagOwned) {
		c.owners.leave(e)
	}
	c.unlink(e)
	c.orphan(e)
	if r.is(flagVisible) {
		c.note(e)
		if c.advisor != nil {
			c.advisor.Remove(e)
		}
		c.stats.Entries--
	} else {
		c.stats.Partial--
	}
	r.hold = r.hold&^flagVisible | flagDropped
	if r.pins() == 0 && c.states.All[e].writing == 0 {
		c.free(e)
	}
}

// depart tells that an entry leaves. One of an ended epoch has left by its reset.
func (c *core) depart(e uint32, why pool.Cause) {
	r := &c.recs.All[e]
	m, words := &c.realms[r.ident.realm()], r.hash.Words()
	d := pool.Departure{
		Space: m.space.spec.Fingerprint, Block: pool.MarkWords(&words), Group: r.ident.group(), Cause: why,
	}
	if c.advisor != nil {
		d.Class = c.advisor.Class(e)
	}
	if m.over {
		d.Cause = pool.ByReset
	}
	c.left(&d)
}

func (c *core) leaveLists(e uint32) {
	for _, l := range [...]*list{&c.recent, &c.partial} {
		if c.recs.All[e].is(l.flag) {
			l.remove(c.recs.All, e)
		}
	}
}

func (c *core) free(e uint32) {
	r := &c.recs.All[e]
	if r.is(flagOwned) {
		c.owners.free(e, c.group(r.ident).bytes)
	}
	c.giveAll(r.head)
	c.leaveRealm(r.ident.realm())
	c.freeRecord(e)
}

// pin pins e; bytes is the size of all its slots.
func (c *core) pin(e uint32, bytes int64) {
	r := &c.recs.All[e]
	if r.pins() == 0 {
		c.stats.PinnedEntries++
		c.stats.Pinned += bytes
	}
	r.hold = r.hold&^flagRead + onePin
}

// unpin ends a pin of e, and reports whether it was the last one of an entry that stays.
func (c *core) unpin(e uint32) (stays bool) {
	r := &c.recs.All[e]
	if r.pins() == 0 {
		return false
	}
	if r.hold -= onePin; r.pins() > 0 {
		return false
	}
	c.stats.PinnedEntries--
	c.stats.Pinned -= c.group(r.ident).bytes
	r.hold &^= flagRead
	if r.is(flagDropped) {
		c.free(e)
		return false
	}
	if !r.is(flagRecent) {
		c.recent.push(c.recs.All, e)
	}
	return true
}
