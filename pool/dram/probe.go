package dram

import "github.com/kvagent/kvagent/pool"

// A chain is looked up in groups: first all their cells are loaded, then all their records, then they are
// compared. Within a group the loads do not depend on each other, so their cache misses overlap.
const (
	groupLen   = 32  // hashes of a group
	lockStride = 256 // hashes looked up before others may have the lock
)

// probe is the result for a group: the visible entries, none where there is none.
type probe struct {
	entry [groupLen]uint32
	hash  [groupLen]uint64
	home  [groupLen]int
	side  [groupLen]*cells
	cell  [groupLen]uint64
}

// look finds hashes from to from+n-1 of h, n at most groupLen.
func (c *core) look(pr *probe, id ident, h *pool.Hashes, from, n int) {
	for i := range n {
		hash := c.hash(id, h.At(from+i))
		pr.hash[i] = hash
		pr.side[i], pr.home[i] = c.table.side(hash)
	}
	for i := range n {
		pr.cell[i] = pr.side[i].cell[pr.home[i]]
	}
	var touched ident
	recs := c.recs.all
	for i := range n {
		at := pr.home[i]
		tag := tagOf(pr.hash[i], at)
		e := uint32(pr.cell[i] >> 32)
		if uint32(pr.cell[i]) != tag {
			e, at = pr.side[i].candidate(at, tag)
		}
		pr.entry[i], pr.home[i] = e, at
		touched ^= recs[e].ident
	}
	c.work.sink = uint64(touched)
	for i := range n {
		pr.entry[i] = c.confirm(pr, i, id, h.At(from+i))
	}
}

// confirm compares the candidate for hash i, and goes on behind it in the rare case that only its tag fits.
func (c *core) confirm(pr *probe, i int, id ident, b []byte) uint32 {
	e := pr.entry[i]
	if e == none {
		return none
	}
	key := words(b)
	r := &c.recs.all[e]
	if r.ident != id || r.hash != key {
		tag := uint32(pr.side[i].cell[pr.home[i]])
		if e = c.match(pr.side[i], pr.home[i]+1, tag, id, &key); e == none {
			return none
		}
		r = &c.recs.all[e]
	}
	if !r.is(flagVisible) {
		return none
	}
	return e
}
