package dram

import (
	"fmt"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// Check verifies all invariants and returns the first violation.
func (p *Pool) Check() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return pool.ErrClosed
	}
	a := audit{core: p.core, slots: map[uint32]uint32{}, realms: map[uint32]int{}, owned: map[uint32]int64{}}
	for e := uint32(1); e < p.core.high; e++ {
		if !p.core.recs.All[e].is(flagLive) {
			continue
		}
		if err := a.entry(e); err != nil {
			return fmt.Errorf("dram: entry %d: %w", e, err)
		}
	}
	for _, check := range []func() error{a.lists, a.counts, a.checkSlabs, a.found, a.checkOwners} {
		if err := check(); err != nil {
			return fmt.Errorf("dram: %w", err)
		}
	}
	return nil
}

// audit recounts what a core counts.
type audit struct {
	*core
	slots                   map[uint32]uint32 // owner of each slot in use
	realms                  map[uint32]int
	stats                   pool.Stats
	recent, lacking, stored int
	owned                   map[uint32]int64 // bytes of the entries that have an owner
}

func (a *audit) entry(e uint32) error {
	r, l := &a.recs.All[e], &a.states.All[e]
	g := a.group(r.ident)
	held := r.pins() > 0 || l.writing != 0
	switch {
	case !a.checkShards(e, len(g.classes)):
		return fmt.Errorf("%d shards present, %d written, of %d", l.present, l.writing, g.full)
	case r.is(flagVisible) && l.present != g.full:
		return fmt.Errorf("entry visible with a rank missing: %d shards of %d", l.present, g.full)
	case !r.is(flagVisible) && !r.is(flagDropped) && l.present == g.full:
		return fmt.Errorf("whole and not visible")
	case r.is(flagDropped) && !held:
		return fmt.Errorf("dropped, not held, and not freed")
	case !r.is(flagDropped) && !r.is(flagVisible) && l.present == 0 && l.writing == 0:
		return fmt.Errorf("empty, and not being written")
	case r.is(flagRecent) != r.is(flagVisible) && r.pins() == 0, r.is(flagRecent) && !r.is(flagVisible):
		return fmt.Errorf("visible %v, in the order of eviction %v", r.is(flagVisible), r.is(flagRecent))
	case r.is(flagPartial) != (!r.is(flagVisible) && !r.is(flagDropped) && l.writing == 0):
		return fmt.Errorf(
			"%d shards present, %d written, in a list of partial entries: %v", l.present, l.writing,
			r.is(flagPartial),
		)
	}
	if err := a.chain(e); err != nil {
		return err
	}
	a.add(e, r, g)
	return a.chainOfSlots(e, r.head, len(g.classes))
}

func (a *audit) add(e uint32, r *record, g *group) {
	a.realms[r.ident.realm()]++
	if r.pins() > 0 {
		a.stats.PinnedEntries++
		a.stats.Pinned += g.bytes
	}
	a.stats.Used += g.bytes
	if r.is(flagOwned) {
		a.owned[e] = g.bytes
	}
	for flag, n := range map[uint32]*int{flagRecent: &a.recent, flagPartial: &a.lacking} {
		if r.is(flag) {
			*n++
		}
	}
	if r.is(flagDropped) {
		return
	}
	a.stored++
	if r.is(flagVisible) {
		a.stats.Entries++
	} else {
		a.stats.Partial++
	}
}

// chain checks the links of an entry to its parent, its siblings and its children.
func (a *audit) chain(e uint32) error {
	r := &a.recs.All[e]
	if r.is(flagDropped) && (r.prev != none || r.next != none || r.child != none) {
		return fmt.Errorf("dropped, and still in a chain")
	}
	if r.prev == none && r.next != none {
		return fmt.Errorf("has a sibling and no parent")
	}
	a.work.steps = int(a.high) + 1
	if r.prev != none && a.root(e) == none {
		return fmt.Errorf("is its own ancestor")
	}
	before := e | upward
	for child := r.child; child != none; child = a.recs.All[child].next {
		c := &a.recs.All[child]
		if c.prev != before {
			return fmt.Errorf("child %d has %x before it, not %x", child, c.prev, before)
		}
		if !c.is(flagLive) || c.is(flagDropped) {
			return fmt.Errorf("child %d is not stored", child)
		}
		before = child
	}
	if r.prev != none {
		up := a.recs.All[r.prev&^upward]
		if !up.is(flagLive) || up.is(flagDropped) {
			return fmt.Errorf("suffix kept when its prefix goes: parent or sibling %d is not stored", r.prev&^upward)
		}
	}
	return nil
}

func (a *audit) chainOfSlots(e, slot uint32, n int) error {
	for i := range n {
		if owner, twice := a.slots[slot]; twice {
			return fmt.Errorf("slot %d is entry %d's too", slot, owner)
		}
		a.slots[slot] = e
		link := a.core.slabs.at(slot).link
		if last := i == n-1; last != (link&upward != 0) || (last && link&^upward != e) {
			return fmt.Errorf("slot %d of shard %d leads to %x", slot, i, link)
		}
		slot = link
	}
	return nil
}

func (a *audit) lists() error {
	for name, l := range map[string]struct {
		*list
		flagged int
	}{
		"recent": {&a.core.recent, a.recent}, "partial": {&a.partial, a.lacking},
	} {
		n, newer := 0, uint32(none)
		for e := l.newest; e != none && n <= l.n; e = a.recs.All[e].older {
			if r := &a.recs.All[e]; !r.is(l.flag) || r.newer != newer {
				return fmt.Errorf(
					"list %s: entry %d has flags %x and %d before it, not %d", name, e, r.hold, r.newer, newer,
				)
			}
			newer = e
			n++
		}
		if n != l.n || n != l.flagged || newer != l.oldest {
			return fmt.Errorf("list %s has %d entries, counts %d, %d have its flag", name, n, l.n, l.flagged)
		}
	}
	return nil
}

func (a *audit) counts() error {
	s := &a.core.stats
	if a.stats.Entries != s.Entries || a.stats.Partial != s.Partial || a.stats.Pinned != s.Pinned ||
		a.stats.PinnedEntries != s.PinnedEntries || a.stats.Used != a.core.slabs.used {
		return fmt.Errorf("counts %+v with %d bytes used, counted again %+v", *s, a.core.slabs.used, a.stats)
	}
	for _, n := range a.core.ended {
		a.realms[n]++ // it waits for its sweep
	}
	for n, r := range a.core.realms {
		if r.entries != a.realms[uint32(n)] {
			return fmt.Errorf("epoch %d has %d entries, counts %d", n, a.realms[uint32(n)], r.entries)
		}
	}
	return nil
}

// checkOwners compares what the owners have with the entries that are marked as owned.
func (a *audit) checkOwners() error {
	bytes := map[string]int64{}
	names := map[pool.Owner]string{}
	each := a.owners.stats().Each
	for _, o := range each {
		if n, err := a.owners.open(o.Name); err == nil {
			names[n] = o.Name
			a.owners.owners[n].users--
		}
	}
	for e, n := range a.owned {
		if o := a.owners.numberOf(e); o != 0 {
			bytes[names[o]] += n
		}
	}
	for _, o := range each {
		if o.Bytes != bytes[o.Name] {
			return fmt.Errorf("owner %q has %d bytes, counted are %d", o.Name, o.Bytes, bytes[o.Name])
		}
	}
	return nil
}

// checkSlabs compares the slabs with the slots of the entries.
func (a *audit) checkSlabs() error {
	s := &a.core.slabs
	free := map[int32]int{}
	left := len(a.slots)
	for n := range int32(len(s.slab)) {
		first, end := s.slots(n)
		if end == first {
			continue // free: no entry may have a slot of it
		}
		id, used := s.classAt(first), 0
		for place, busy := range s.inUse(n) {
			if _, owned := a.slots[s.slot(n, uint32(place))]; owned != busy {
				return fmt.Errorf("slab %d: slot %d in use %v, an entry has it %v", n, place, busy, owned)
			} else if busy {
				used++
			}
		}
		b, k := &s.slab[n], &s.class[id]
		if left -= used; used == 0 || int(b.used) != used {
			return fmt.Errorf("slab %d has %d slots in use, counts %d", n, used, b.used)
		}
		free[id] += 0
		if !b.bad {
			free[id] += int(k.perSlab) - used
		}
		if !s.full(n) && !slices.Contains(k.room, n) || len(k.room) > len(s.slab) {
			return fmt.Errorf("slab %d has room, and class %d, with %d slabs, does not know", n, id, len(k.room))
		}
	}
	if left != 0 {
		return fmt.Errorf("entries have %d slots of free slabs", left)
	}
	for id, n := range free {
		if got := s.free(id); got != n {
			return fmt.Errorf("class %d: %d slots may be allocated, %d of them beside a bad page", id, got, got-n)
		}
	}
	return nil
}

// found looks every entry up.
func (a *audit) found() error {
	for e := uint32(1); e < a.high; e++ {
		r := &a.recs.All[e]
		if !r.is(flagLive) || r.is(flagDropped) {
			continue
		}
		if got := a.findWords(r.ident, &r.hash); got != e {
			return fmt.Errorf("entry %d is found as %d", e, got)
		}
	}
	if n := a.table.Entries(); a.stored != n {
		return fmt.Errorf("%d entries are stored, the table has %d", a.stored, n)
	}
	return nil
}

// checkShards compares the states of an entry's n shards with their counts.
func (c *core) checkShards(e uint32, n int) (ok bool) {
	var count [shardPresent + 1]uint16
	slot := c.recs.All[e].head
	for range n {
		count[*c.slabs.state(slot)]++
		slot = c.slabs.at(slot).link
	}
	l := &c.states.All[e]
	return l.present == count[shardPresent] && l.writing == count[shardWriting]
}
