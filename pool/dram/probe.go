package dram

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// A chain is looked up in groups. Blocks that were stored together mostly have consecutive records,
// so after a hit the next record is tried first: this needs no table and the processor prefetches
// it. The others are searched in passes: all buckets of the group are loaded, then all records,
// then they are compared. Loads within a pass are independent, so their cache misses overlap.
const (
	groupLen   = 32  // hashes of a group
	lockStride = 256 // hashes looked up before the lock is released
)

// probe is the result for a group, valid while the lock is held: the visible entries, or none.
type probe struct {
	key   [groupLen]offheap.Key
	entry [groupLen]uint32
	next  uint32 // record to try for the next hash; none at the start of a walk, which ends with the lock

	// These are set for hashes that were searched.
	hash   [groupLen]uint64
	home   [groupLen]int
	side   [groupLen]*offheap.Buckets
	bucket [groupLen]uint64
}

// look finds hashes from to from+n-1 of h, n at most groupLen.
func (c *core) look(id ident, h *pool.Hashes, from, n int) {
	pr := &c.probe
	for i := range n {
		pr.key[i] = offheap.KeyOf(h.At(from + i))
	}
	i := 0
	if pr.next == none {
		c.search(id, 0, 1)
		pr.next, i = recordAfter(pr.entry[0]), 1
	}
	if i = c.follow(id, i, n); i < n {
		c.search(id, i, n)
		pr.next = recordAfter(pr.entry[n-1])
	}
}

func recordAfter(e uint32) uint32 {
	if e == none {
		return none
	}
	return e + 1
}

// follow finds hashes of the group from i on while each is in the record after the previous one.
func (c *core) follow(id ident, i, n int) int {
	pr, recs := &c.probe, c.recs.All
	for ; i < n && pr.next != none && pr.next < c.high; i++ {
		r := &recs[pr.next]
		if r.ident != id || r.hash != pr.key[i] || !r.is(flagVisible) {
			break
		}
		pr.entry[i] = pr.next
		pr.next++
	}
	return i
}

// search finds hashes first to n-1 of the group in the table.
func (c *core) search(id ident, first, n int) {
	pr := &c.probe
	for i := first; i < n; i++ {
		hash := c.seed.Hash(uint32(id), pr.key[i])
		pr.hash[i] = hash
		pr.side[i], pr.home[i] = c.table.Side(hash)
	}
	for i := first; i < n; i++ {
		pr.bucket[i] = pr.side[i].Bucket[pr.home[i]]
	}
	var touched uint32
	recs, states := c.recs.All, c.states.All
	for i := first; i < n; i++ {
		at := pr.home[i]
		tag := offheap.TagOf(pr.hash[i], at)
		e := uint32(pr.bucket[i] >> 32)
		if uint32(pr.bucket[i]) != tag {
			e, at = pr.side[i].Candidate(at, tag)
		}
		pr.entry[i], pr.home[i] = e, at
		touched ^= uint32(recs[e].ident) ^ states[e].serial
	}
	c.work.sink = uint64(touched)
	for i := first; i < n; i++ {
		if pr.entry[i] != none {
			pr.entry[i] = c.confirm(i, id)
		}
	}
}

// confirm compares the candidate for hash i, and searches on if only its tag matches.
func (c *core) confirm(i int, id ident) uint32 {
	pr := &c.probe
	e, k := pr.entry[i], &pr.key[i]
	r := &c.recs.All[e]
	if r.ident != id || r.hash != *k {
		tag := uint32(pr.side[i].Bucket[pr.home[i]])
		if e = c.match(pr.side[i], pr.home[i]+1, tag, id, k); e == none {
			return none
		}
		r = &c.recs.All[e]
	}
	if !r.is(flagVisible) {
		return none
	}
	return e
}
