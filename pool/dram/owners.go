package dram

import (
	"fmt"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// ownerTable is all owners and their entries. The pool's lock guards it. Entries are the pool's
// numbers, 0 is none. Nothing is kept of an entry without an owner.
type ownerTable struct {
	links  offheap.Region[ownedLink] // of owned entries, by their numbers
	owners [pool.MaxOwners + 1]owner
	byName map[string]pool.Owner

	path []uint32 // of lift

	evicted, refused uint64 // of all owners, also of those that are no longer in the table
}

// owner is one owner. Number 0 is nobody, without a budget.
type owner struct {
	name           string // empty: the number is free
	users          int    // OpenOwners without a CloseOwner
	budget         int64  // bytes; 0: none
	bytes          int64
	newest, oldest uint32
	term           uint32 // of the number: entries of an earlier term belong to nobody

	evicted, evictedBytes, refused uint64
}

// ownedLink is what is kept of an owned entry: its place among its owner's.
type ownedLink struct {
	newer, older uint32
	term         uint32 // of the owner's number
	owner        pool.Owner
	listed       bool
	lifted       bool // placed above its children by lift, and not moved since
}

// newOwners returns the table of a pool that has at most this many entries.
func newOwners(most int) (t ownerTable, err error) {
	t.links, err = offheap.Map[ownedLink](most)
	t.byName = map[string]pool.Owner{}
	return t, err
}

// open returns the number of the owner with a name, which it keeps for that name until as many
// calls of CloseOwner. Afterwards it stays the name's as long as its place is not needed; then the
// entries of the closed owner with the fewest bytes belong to nobody from that moment on.
func (t *ownerTable) open(name string) (pool.Owner, error) {
	if name == "" || len(name) > pool.MaxOwnerName {
		return 0, fmt.Errorf("dram: owner: a name of %d bytes, allowed: 1 to %d", len(name), pool.MaxOwnerName)
	}
	if o, ok := t.byName[name]; ok {
		t.owners[o].users++
		return o, nil
	}
	place := t.place()
	if place == 0 {
		return 0, fmt.Errorf("dram: owner: %d owners are open: %w", pool.MaxOwners, pool.ErrTooLarge)
	}
	o := &t.owners[place]
	delete(t.byName, o.name)
	*o = owner{name: name, users: 1, term: o.term + 1}
	t.byName[name] = place
	return place, nil
}

// place returns a free number, or that of the closed owner with the fewest bytes; 0: all are open.
func (t *ownerTable) place() (best pool.Owner) {
	for i := 1; i < len(t.owners); i++ {
		o := &t.owners[i]
		switch {
		case o.name == "":
			return pool.Owner(i)
		case o.users == 0 && (best == 0 || o.bytes < t.owners[best].bytes):
			best = pool.Owner(i)
		}
	}
	return best
}

// OpenOwner implements pool.Memory.
func (p *Pool) OpenOwner(name string) (o pool.Owner, err error) {
	if !p.locked(func(c *core) { o, err = c.owners.open(name) }) {
		return 0, pool.ErrClosed
	}
	return o, err
}

// CloseOwner implements pool.Memory. The owner's entries and its budget stay.
func (p *Pool) CloseOwner(o pool.Owner) {
	p.locked(func(c *core) {
		if at := &c.owners.owners[o]; at.users > 0 {
			at.users--
		}
	})
}

// SetBudget implements pool.Memory. An owner that has more loses entries with each reservation
// until it has not.
func (p *Pool) SetBudget(o pool.Owner, bytes int64) {
	if o != 0 {
		p.locked(func(c *core) { c.owners.owners[o].budget = bytes })
	}
}

func (o *owner) fits(bytes int64) bool { return o.budget == 0 || o.bytes+bytes <= o.budget }

// afford reports whether an owner's budget has room for so many bytes, after evicting of its own
// entries as many as that takes. The entry that the new one is to follow stays.
func (c *core) afford(o pool.Owner, bytes int64, parent uint32) bool {
	at := &c.owners.owners[o]
	if at.fits(bytes) {
		return true
	}
	if bytes > at.budget {
		return false // however many were evicted
	}
	c.keep = parent
	defer func() { c.keep = none }()
	for ; !at.fits(bytes); c.work.ownedOut-- {
		e := c.owners.victim(o, c, &c.work.owned)
		if e == none || c.work.ownedOut == 0 {
			return false
		}
		c.owners.evicted++
		at.evicted++
		at.evictedBytes += uint64(c.group(c.recs.All[e].ident).bytes)
		c.evict(e, pool.ByBudget)
	}
	return true
}

// own makes a new entry of this many bytes the owner's. It becomes the owner's most recent but for
// above, if that is the owner's too.
func (t *ownerTable) own(e uint32, o pool.Owner, bytes int64, above uint32) {
	t.links.Use(int(e) + 1)
	at := &t.owners[o]
	at.bytes += bytes
	t.links.All[e] = ownedLink{term: at.term, owner: o}
	t.insert(e, above)
}

// free ends the ownership of an entry of this many bytes, which has left the pool.
func (t *ownerTable) free(e uint32, bytes int64) {
	t.leave(e)
	if at := t.ownerOf(e); at != nil {
		at.bytes -= bytes
	}
	t.links.All[e] = ownedLink{}
}

// leave removes an entry from the order of its owner's. It still counts until free.
func (t *ownerTable) leave(e uint32) {
	if l := &t.links.All[e]; l.listed && t.ownerOf(e) != nil {
		t.remove(e)
	}
}

// use makes an entry the most recent of its owner's but for above, if that has the same owner.
func (t *ownerTable) use(e, above uint32) {
	if l := &t.links.All[e]; l.listed && t.ownerOf(e) != nil {
		t.remove(e)
		t.insert(e, above)
	}
}

// ownerOf returns the owner of an entry; nil if its place was given away.
func (t *ownerTable) ownerOf(e uint32) *owner {
	l := &t.links.All[e]
	if at := &t.owners[l.owner]; l.owner != 0 && at.term == l.term {
		return at
	}
	return nil
}

// stats returns the owners that are open or have entries, by their numbers, and the totals.
func (t *ownerTable) stats() (s pool.OwnersStats) {
	s.Evicted, s.Refused, s.Each = t.evicted, t.refused, []pool.OwnerStats{}
	for i := range t.owners {
		if o := &t.owners[i]; o.name != "" && (o.users > 0 || o.bytes > 0) {
			s.Each = append(s.Each, pool.OwnerStats{
				Name: o.name, Open: o.users > 0, Bytes: o.bytes, Budget: o.budget,
				Evicted: o.evicted, EvictedBytes: o.evictedBytes, Refused: o.refused,
			})
		}
	}
	return s
}

// usedSteps is the price of passing over an entry in use, which later calls meet again. A chain is
// put in order once, for a step of each entry.
const usedSteps = 4

// victim returns the least recently used of the owner's entries that is neither held nor has
// children; 0 if there is none, or if the steps do not suffice, of which it takes those that it
// needs. The entries that it passes over are moved up, so a later call continues. An entry that can
// be evicted is never moved, so there is none once an entry that became the newest is the oldest.
func (t *ownerTable) victim(o pool.Owner, v pool.View, steps *int) uint32 {
	at := &t.owners[o]
	for first := uint32(0); ; {
		e := at.oldest
		switch {
		case e == 0 || v.Child(e) == 0 && !v.Held(e):
			return e
		case e == first || *steps <= 0:
			return 0
		}
		*steps -= t.lift(e, v)
		if first == 0 && at.newest == e {
			first = e
		}
	}
}

// maxPath bounds the entries that one lift moves, by which it may exceed the steps. Beyond it, a
// chain is put in order in parts, each of which moves those before it again.
const maxPath = 16 << 10

// lift moves an entry with children just above one of them, that one above one of its own, and so
// on down to one that was lifted before, so each chain that was stored in parts from its beginning
// is put in order once. An entry that is held, or whose child is held or another owner's, is in
// use, and becomes the most recent. It returns the steps taken.
func (t *ownerTable) lift(e uint32, v pool.View) int {
	path := append(t.path[:0], e)
	for end := e; !v.Held(e) && len(path) < maxPath; {
		if end = v.Child(end); !t.together(e, end) || v.Held(end) {
			break
		}
		if path = append(path, end); t.links.All[end].lifted {
			break
		}
	}
	t.path = path[:0]
	if len(path) == 1 {
		t.use(e, 0)
		return usedSteps
	}
	for i := len(path) - 2; i >= 0; i-- {
		t.remove(path[i])
		t.insert(path[i], t.links.All[path[i+1]].newer)
		t.links.All[path[i]].lifted = true
	}
	return len(path)
}

// together reports whether an entry is in the order of the same owner as another one.
func (t *ownerTable) together(e, other uint32) bool {
	a, b := &t.links.All[e], &t.links.All[other]
	return b.listed && a.owner == b.owner && a.term == b.term
}

// insert makes an entry the newest, or the one just older than above, if that is in the same order.
func (t *ownerTable) insert(e, above uint32) {
	if above != e && t.together(e, above) {
		t.insertBelow(e, above)
		return
	}
	l := &t.links.All[e]
	at := &t.owners[l.owner]
	l.newer, l.older, l.listed = 0, at.newest, true
	if at.newest != 0 {
		t.links.All[at.newest].newer = e
	} else {
		at.oldest = e
	}
	at.newest = e
}

func (t *ownerTable) insertBelow(e, above uint32) {
	l, a := &t.links.All[e], &t.links.All[above]
	l.newer, l.older, l.listed = above, a.older, true
	if a.older != 0 {
		t.links.All[a.older].newer = e
	} else {
		t.owners[l.owner].oldest = e
	}
	a.older = e
}

func (t *ownerTable) remove(e uint32) {
	l := &t.links.All[e]
	at := &t.owners[l.owner]
	if l.newer != 0 {
		t.links.All[l.newer].older = l.older
	} else {
		at.newest = l.older
	}
	if l.older != 0 {
		t.links.All[l.older].newer = l.newer
	} else {
		at.oldest = l.newer
	}
	l.newer, l.older, l.listed, l.lifted = 0, 0, false, false
}
