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
	high   int                       // elements of links from here on were never used
	owners [pool.MaxOwners + 1]owner
	byName map[string]pool.Owner

	path []uint32 // of lift

	evicted, refused uint64 // of all owners, also of those that are no longer in the table
}

// owner is one owner. Number 0 is none and not used.
type owner struct {
	name           string // empty: the number is free
	users          int    // Opens without a Close
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

// close releases the memory.
func (t *ownerTable) close() error { return t.links.Close() }

// open returns the number of the owner with a name, which it keeps for that name until as many
// calls of Close. Afterwards it stays the name's as long as its place is not needed; then the
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

// end ends one Open. The owner's entries and its budget stay.
func (t *ownerTable) end(o pool.Owner) {
	if t.is(o) && t.owners[o].users > 0 {
		t.owners[o].users--
	}
}

// setBudget sets how many bytes the owner's entries may have; 0: any number. An owner that has more
// loses entries with each reservation until it has not.
func (t *ownerTable) setBudget(o pool.Owner, bytes int64) {
	if t.is(o) {
		t.owners[o].budget = bytes
	}
}

func (t *ownerTable) is(o pool.Owner) bool {
	return o != 0 && int(o) < len(t.owners) && t.owners[o].name != ""
}

// fits reports whether the owner may have so many bytes more.
func (t *ownerTable) fits(o pool.Owner, bytes int64) bool {
	if !t.is(o) {
		return true
	}
	at := &t.owners[o]
	return at.budget == 0 || at.bytes+bytes <= at.budget
}

// mayFit reports whether the owner may have so many bytes at all.
func (t *ownerTable) mayFit(o pool.Owner, bytes int64) bool {
	return !t.is(o) || t.owners[o].budget == 0 || bytes <= t.owners[o].budget
}

// own makes an entry of this many bytes the owner's. It becomes the owner's most recent but for
// above, if that is the owner's too. It returns false, and the entry is nobody's, if there is no
// such owner.
func (t *ownerTable) own(e uint32, o pool.Owner, bytes int64, above uint32) bool {
	if !t.is(o) {
		return false
	}
	t.high = max(t.high, int(e)+1)
	t.links.Use(t.high)
	at := &t.owners[o]
	at.bytes += bytes
	t.links.All[e] = ownedLink{term: at.term, owner: o}
	t.insert(e, above)
	return true
}

// free ends the ownership of an entry of this many bytes, which has left the pool.
func (t *ownerTable) free(e uint32, bytes int64) {
	t.leave(e)
	if at := t.ownerOf(e); at != nil {
		at.bytes -= bytes
	}
	t.links.All[e] = ownedLink{}
}

// leave removes an entry from the order of its owner's. It still counts until Free.
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

// numberOf returns the owner of an owned entry; 0 if its owner's place was given away.
func (t *ownerTable) numberOf(e uint32) pool.Owner {
	if t.ownerOf(e) == nil {
		return 0
	}
	return t.links.All[e].owner
}

// ownerOf returns the owner of an entry; nil if its place was given away.
func (t *ownerTable) ownerOf(e uint32) *owner {
	l := &t.links.All[e]
	if at := &t.owners[l.owner]; l.owner != 0 && at.term == l.term {
		return at
	}
	return nil
}

// countEvicted counts an entry that was evicted for the owner's budget.
func (t *ownerTable) countEvicted(o pool.Owner, bytes int64) {
	t.evicted++
	t.owners[o].evicted++
	t.owners[o].evictedBytes += uint64(bytes)
}

// countRefused counts blocks that the owner's budget had no room for.
func (t *ownerTable) countRefused(o pool.Owner, blocks int) {
	if !t.is(o) {
		return
	}
	t.refused += uint64(blocks)
	t.owners[o].refused += uint64(blocks)
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
