package dram

// A chain is looked up in groups: first all their cells are loaded, then all their records, then they are
// compared. Within a group the loads do not depend on each other, so their cache misses overlap.
const (
	groupLen   = 32  // hashes of a group
	lockStride = 256 // hashes looked up before others may have the lock
)

// probe is the result for a group, valid while the lock is held: the visible entries, none where there is none.
type probe struct {
	key   [groupLen]key
	entry [groupLen]uint32
	hash  [groupLen]uint64
	home  [groupLen]int
	side  [groupLen]*cells
	cell  [groupLen]uint64
}

// look finds hashes from to from+n-1 of h, n at most groupLen.
func (c *core) look(id ident, v *view, from, n int) {
	pr := &c.probe
	for i := range n {
		pr.key[i] = v.words(from + i)
		hash := c.seed.hash(id, pr.key[i])
		pr.hash[i] = hash
		pr.side[i], pr.home[i] = c.table.side(hash)
	}
	for i := range n {
		pr.cell[i] = pr.side[i].cell[pr.home[i]]
	}
	var touched uint32
	recs, lives := c.recs.all, c.lives.all
	for i := range n {
		at := pr.home[i]
		tag := tagOf(pr.hash[i], at)
		e := uint32(pr.cell[i] >> 32)
		if uint32(pr.cell[i]) != tag {
			e, at = pr.side[i].candidate(at, tag)
		}
		pr.entry[i], pr.home[i] = e, at
		touched ^= uint32(recs[e].ident) ^ lives[e].generation
	}
	c.work.sink = uint64(touched)
	for i := range n {
		if e := pr.entry[i]; e != none {
			pr.entry[i] = c.confirm(i, id)
		}
	}
}

// confirm compares the candidate for hash i, and goes on behind it in the rare case that only its tag fits.
func (c *core) confirm(i int, id ident) uint32 {
	pr := &c.probe
	e, k := pr.entry[i], &pr.key[i]
	r := &c.recs.all[e]
	if r.ident != id || r.hash != *k {
		tag := uint32(pr.side[i].cell[pr.home[i]])
		if e = c.match(pr.side[i], pr.home[i]+1, tag, id, k); e == none {
			return none
		}
		r = &c.recs.all[e]
	}
	if !r.is(flagVisible) {
		return none
	}
	return e
}
