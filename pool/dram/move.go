package dram

import (
	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/slab"
)

// An entry moves while it is not held: its bytes are copied without the lock, and if it is still
// there, unheld and unchanged afterwards, it gets the new slot. A job that pins it meanwhile reads
// the old slot, which stays as it is.

const (
	moveStride      = 256     // slots copied before the lock is released twice
	moveStrideBytes = 4 << 20 // ... or as many bytes
	moveRounds      = 3       // attempts to move an entry that is held
	// maxMoveChildren bounds the children of a moved entry whose headers in the pool's file are
	// updated. After a restart the others are roots, until they are looked up.
	maxMoveChildren = 4 << 10
)

// tenant is a shard in a slab that is to be emptied.
type tenant struct {
	ref   pool.Ref
	slot  uint32
	shard uint8
}

// move is a shard being copied.
type move struct {
	tenant
	to       uint32
	present  uint16 // as its entry's state has it: shards are added only
	from, at int64  // offsets
	bytes    int64  // to be copied; 0: nothing was written yet
	failed   bool   // a page could not be read or written
}

// survey appends the shards in a slab; it returns false at the first entry that is held.
func (c *core) survey(n int32, out []tenant) ([]tenant, bool) {
	for place, busy := range c.slabs.InUse(n) {
		if !busy {
			continue
		}
		slot := c.slabs.Slot(n, uint32(place))
		e := c.owner(slot)
		if e == none || c.held(e) || c.recs.All[e].is(flagDropped) {
			return out, false
		}
		out = append(out, tenant{ref: c.ref(e), slot: slot, shard: c.shardAt(e, slot)})
	}
	return out, true
}

// shardAt returns the number of the shard that lies in a slot of an entry.
func (c *core) shardAt(e, slot uint32) (shard uint8) {
	for at := c.recs.All[e].head; at != slot; at = c.slabs.At(at).Link {
		shard++
	}
	return shard
}

// locate returns the entry of a tenant, and whether it still lies in its slot.
func (c *core) locate(t *tenant) (e uint32, ok bool) {
	e = c.lookupRef(t.ref)
	if e == none {
		return none, false
	}
	slot, _ := c.shardCell(c.recs.All[e].head, int(t.shard))
	return e, slot == t.slot
}

// planMoves takes slots for the next tenants of a slab, and returns the remaining and the held
// tenants. full is set if there are no more slots.
func (c *core) planMoves(tenants, held []tenant) (left, stay []tenant, full bool) {
	c.moving = c.moving[:0]
	bytes := int64(0)
	for len(tenants) > 0 && len(c.moving) < moveStride && bytes < moveStrideBytes {
		t := tenants[0]
		e, ok := c.locate(&t)
		switch {
		case !ok:
		case c.held(e):
			held = append(held, t)
		default:
			id := c.slabs.ClassAt(t.slot)
			if !c.slabs.HasRoom(id) {
				return tenants, held, true
			}
			to, _ := c.slabs.Take(id)
			*c.slabs.At(to) = slab.Cell{Link: none | upward}
			m := move{
				tenant: t, to: to, present: c.states.All[e].present,
				from: c.slabs.Offset(t.slot), at: c.slabs.Offset(to),
			}
			if c.isPresent(e, t.shard) {
				m.bytes = int64(c.slot(e, t.shard).Len)
				bytes += m.bytes
			}
			c.moving = append(c.moving, m)
		}
		tenants = tenants[1:]
	}
	return tenants, held, false
}

// settleMoves assigns moved entries their new slots, and appends to held those that are held now.
func (c *core) settleMoves(held []tenant) []tenant {
	for i := range c.moving {
		m := &c.moving[i]
		e, ok := c.locate(&m.tenant)
		switch {
		case ok && (c.recs.All[e].pins() > 0 || c.states.All[e].writing != 0):
			held = append(held, m.tenant)
			c.slabs.Give(m.to)
		case !ok || c.states.All[e].present != m.present:
			c.slabs.Give(m.to)
		case m.failed: // the page that cannot be read or written was retired
			held = append(held, m.tenant)
			c.slabs.Give(m.to)
		default:
			c.settleMove(e, m)
		}
	}
	c.moving = c.moving[:0]
	return held
}

func (c *core) settleMove(e uint32, m *move) {
	*c.slabs.At(m.to) = *c.slabs.At(m.slot)
	if m.shard == 0 {
		c.recs.All[e].head = m.to
	} else {
		_, before := c.shardCell(c.recs.All[e].head, int(m.shard)-1)
		before.Link = m.to
	}
	c.persistMove(e, m)
	c.slabs.Give(m.slot)
	c.stats.Moved++
	c.stats.MovedBytes += uint64(c.slabs.SizeAt(m.to))
}

// gather gets a slab for a class that an entry lacked, and reports whether to try the entry again.
func (p *Pool) gather(g *progress) bool {
	p.moves.Lock() // one at a time: a reservation that waits here may find room afterwards
	defer p.endMoves()
	taking := gathering{
		core: p.core, classes: g.classes, class: g.want.class, source: g.want.source,
		donor: slab.NoClass, emptying: slab.NoSlab,
	}
	taking.left = 2 * p.info.SlabBytes * int64(len(g.classes)+1)
	for drains := 0; drains < maxDrains; {
		switch p.gatherStep(&taking, g.parent) {
		case gotRoom:
			return true
		case inVain:
			return false
		case empties:
			drains++
			if p.empty(&taking, g) {
				return true
			}
		}
	}
	return false
}

func (p *Pool) gatherStep(taking *gathering, parent pool.Ref) (o outcome) {
	o = inVain
	p.locked(func(c *core) {
		c.keep = c.lookupRef(parent)
		o = taking.step()
		c.keep = none
	})
	return o
}

// empty moves the content of a slab to others, and reports whether it is free afterwards.
func (p *Pool) empty(taking *gathering, g *progress) bool {
	left := taking.tenants
	var held []tenant
	full := false
	for rounds := 0; rounds < moveRounds && g.moved < g.mayMove && !full; rounds++ {
		for len(left) > 0 && g.moved < g.mayMove && !full {
			left, held, full = p.moveSome(left, held, g)
		}
		left, held = held, nil
	}
	emptied := false
	p.locked(func(c *core) { emptied = c.slabs.EndDrain(taking.emptying) })
	return emptied
}

// moveSome performs one stride of empty.
func (p *Pool) moveSome(tenants, held []tenant, g *progress) (left, stay []tenant, full bool) {
	if !p.locked(func(c *core) { left, held, full = c.planMoves(tenants, held) }) {
		return nil, nil, true
	}
	moving := p.core.moving // moves is held, so nothing else changes it
	for i := range moving {
		m := &moving[i]
		m.failed = !p.copyMove(m)
		g.moved += m.bytes
	}
	p.locked(func(c *core) { stay = c.settleMoves(held) })
	return left, stay, full
}

// copyMove copies a shard to its new slot. It returns false if a page of either cannot be read or
// written; that page is retired and endMoves reports it.
func (p *Pool) copyMove(m *move) bool {
	if p.fd < 0 {
		return true // an arena without memory, for benchmarks
	}
	to, from := p.base[m.at:][:m.bytes], p.base[m.from:][:m.bytes]
	// The whole arena is guarded: for broken memory the kernel may report the start of the page,
	// which may lie before the slot.
	if pagefault.Guard(p.base, nil, func() { copy(to, from) }) == nil {
		return true
	}
	p.probeReporting(m.from, m.from+m.bytes, p.noteRetired)
	p.probeReporting(m.at, m.at+m.bytes, p.noteRetired)
	return false
}

func (p *Pool) noteRetired(page BadPage) { p.retired = append(p.retired, page) }

// endMoves releases moves, and reports the pages that were retired while it was held.
func (p *Pool) endMoves() {
	retired := p.retired
	p.retired = nil
	p.moves.Unlock()
	for _, page := range retired {
		p.reportBad(page)
	}
}
