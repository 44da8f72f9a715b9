package dram

import (
	"errors"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/offheap"
	"github.com/kvagent/kvagent/pool/dram/slab"
)

// core is everything the pool's lock guards: what is stored, where, and in which order it goes. Its methods
// are called with the lock held. Byte copies never are.
type core struct {
	seed  seed
	table offheap.Table
	recs  offheap.Region[record]
	lives offheap.Region[life]
	high  uint32 // records from here on were never used
	spare uint32 // first unused record below high

	slabs  slab.Slabs
	file   *arena.File // nil: the pool ends with the process
	recent list        // visible and not pinned, by use
	round  uint32      // where the hand of Coldest is

	// Entries that lack shards nobody writes. Every partialAge the young become old, and the old are reclaimed.
	partialYoung, partialOld list
	rotated                  time.Time

	spaces  []*space
	byPrint map[pool.Fingerprint]pool.SpaceID
	realms  []realm
	// Spaces that the pool's file has and nobody opened since: their entries are in the index and can be evicted.
	unopened map[pool.Fingerprint]*space
	idle     []uint32 // realms without entries, to be used again
	ended    []uint32 // realms that are over and wait for a sweep

	keep     uint32 // an entry that must stay while room is made for what hangs on it
	work     work
	probe    probe
	scratch  []uint32
	foundOld []int  // by class: calls of asOld that are true without a look
	wanted   wanted // what a reservation cannot have while the lock is held
	moving   []move // entries being copied to other slots
	now      func() time.Time

	advisor *advisor  // nil: none
	kinds   [][]int32 // classes of the slots of each kind of entries
	shown   []uint32  // entries that became visible, and the policy has not been told

	pressure func(need int64) bool
	stats    pool.Stats

	badDropped uint64 // entries that were in bad pages
}

// newCore makes an empty index of an arena with pages of so many bytes; f is its file, nil if it has none.
func newCore(o *Options, page int64, seed seed, f *arena.File) (c *core, err error) {
	c = &core{
		seed: seed, high: 1, now: o.Clock, rotated: o.Clock(), file: f, byPrint: map[pool.Fingerprint]pool.SpaceID{},
		unopened: map[pool.Fingerprint]*space{},
		recent:   list{flag: flagRecent}, partialYoung: list{flag: flagYoung}, partialOld: list{flag: flagOld},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	most := int(o.Bytes/arena.SlotUnit) + 1 // an entry has a slot
	if c.recs, err = offheap.Reserve[record](most); err != nil {
		return c, err
	}
	if c.lives, err = offheap.Reserve[life](most); err != nil {
		return c, err
	}
	if c.table, err = offheap.OpenTable(); err != nil {
		return c, err
	}
	if c.slabs, err = slab.New(o.Bytes, o.SlabBytes, page, f); err != nil {
		return c, err
	}
	if !c.recs.Grow(1) || !c.lives.Grow(1) { // record 0 is none, and may be read
		return c, errors.New("dram: no memory for headers")
	}
	return c, nil
}

// close leaves a core in which nothing is found and no ref is known.
func (c *core) close() error {
	c.spaces, c.realms, c.byPrint, c.unopened, c.ended, c.high = nil, nil, nil, nil, nil, 0
	return errors.Join(c.table.Close(), c.recs.Close(), c.lives.Close(), c.slabs.Close())
}

// hashes are the hashes of entries, for a table that moves them.
func (c *core) hashes(entries []uint32, hashes []uint64) {
	var touched uint64
	for _, e := range entries { // independent loads: their misses overlap
		touched ^= c.recs.All[e].hash.a
	}
	c.work.sink = touched
	for i, e := range entries {
		r := &c.recs.All[e]
		hashes[i] = c.seed.hash(r.ident, r.hash)
	}
}

// find is the entry of a key, visible or not; none if there is none.
func (c *core) find(id ident, b []byte) uint32 {
	k := words(b)
	return c.findWords(id, &k)
}

func (c *core) findWords(id ident, k *key) uint32 {
	h := c.seed.hash(id, *k)
	cells, home := c.table.Side(h)
	return c.match(cells, home, offheap.TagOf(h, home), id, k)
}

// match goes on from cell i to the entry with this key.
func (c *core) match(cells *offheap.Cells, i int, tag uint32, id ident, k *key) uint32 {
	for {
		var e uint32
		if e, i = cells.Candidate(i, tag); e == none {
			return none
		}
		if r := &c.recs.All[e]; r.ident == id && r.hash == *k {
			return e
		}
		i++
	}
}

// held is true for an entry somebody reads, writes, or just now puts something behind.
func (c *core) held(e uint32) bool {
	return e == c.keep || c.recs.All[e].pins() > 0 || c.lives.All[e].writing != 0
}

// deref is the entry of a ref that somebody holds.
func (c *core) deref(ref pool.Ref) (e uint32, ok bool) {
	e = uint32(ref)
	if e == none || e >= c.high || c.lives.All[e].generation != uint32(ref>>32) || !c.recs.All[e].is(flagLive) {
		return none, false
	}
	return e, true
}

func (c *core) ref(e uint32) pool.Ref {
	return pool.Ref(uint64(c.lives.All[e].generation)<<32 | uint64(e))
}

// still is the entry of a ref nobody need hold, if it is still there to be found; none otherwise.
func (c *core) still(ref pool.Ref) uint32 {
	if e, ok := c.deref(ref); ok && !c.recs.All[e].is(flagDropped) {
		return e
	}
	return none
}
