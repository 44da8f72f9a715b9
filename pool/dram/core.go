package dram

import (
	"errors"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// core is everything that the pool's lock guards: the entries, their places and the order of
// eviction. Its methods are called with the lock held. Bytes of blocks are never copied under it.
type core struct {
	seed   offheap.Seed
	table  offheap.Table
	recs   offheap.Region[record]
	states offheap.Region[recordState]
	high   uint32 // records from here on were never used
	spare  uint32 // first unused record below high

	slabs  slabs
	file   *arena.File // nil: the pool ends with the process
	recent list        // visible, by use; see unpinned

	partial list // lacking shards that no job is writing: reclaimed before others are evicted

	spaces  []*space
	byPrint map[pool.Fingerprint]pool.SpaceID
	realms  []realm
	// Spaces in the pool's file that have not been opened yet in this process. Their entries are in
	// the index and can be evicted.
	unopened map[pool.Fingerprint]*space
	idle     []uint32 // realms without entries, for reuse
	ended    []uint32 // realms that ended and wait for a sweep

	keep     uint32 // an entry that must stay while room is made for its child
	incoming uint64 // print of the block that room is made for, if it may be refused; 0 otherwise
	refused  bool   // the policy refused that block
	work     work
	probe    probe
	scratch  []uint32
	foundOld []int // by class: further calls of asOld that return true at once
	now      func() time.Time

	advisor pool.Advisor // nil: none
	kinds   [][]int32    // classes of the slots of each kind of entries
	shown   []uint32     // entries that became visible and are not yet passed to the policy

	owners ownerTable

	pressure func(need int64) bool
	stats    pool.Stats

	notes notes
	left  func(*pool.Departure) // nil: nobody asks
}

// newCore makes an empty index of an arena with pages of this many bytes; f is its file or nil.
func newCore(o *Options, page int64, seed offheap.Seed, f *arena.File) (c *core, err error) {
	c = &core{
		seed: seed, high: 1, now: o.Clock, file: f,
		byPrint: map[pool.Fingerprint]pool.SpaceID{}, unopened: map[pool.Fingerprint]*space{},
		recent: list{flag: flagRecent}, partial: list{flag: flagPartial},
		notes: notes{changed: make(chan struct{}, 1)}, left: o.Left, advisor: o.Advisor,
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	most := int(o.Bytes/arena.SlotUnit) + 1 // an entry has a slot
	if c.recs, err = offheap.Map[record](most); err != nil {
		return c, err
	}
	if c.states, err = offheap.Map[recordState](most); err != nil {
		return c, err
	}
	if c.owners, err = newOwners(most); err != nil {
		return c, err
	}
	if c.table, err = offheap.OpenTable(); err != nil {
		return c, err
	}
	if c.slabs, err = newSlabs(o.Bytes, o.SlabBytes, page, f); err != nil {
		return c, err
	}
	return c, nil
}

// close releases the memory. Afterwards nothing is found and no ref is valid.
func (c *core) close() error {
	c.spaces, c.realms, c.byPrint, c.unopened, c.ended, c.high = nil, nil, nil, nil, nil, 0
	return errors.Join(c.table.Close(), c.recs.Close(), c.states.Close(), c.owners.links.Close(),
		c.slabs.close())
}

// hashes computes the hashes of entries, for a table that moves them.
func (c *core) hashes(entries []uint32, hashes []uint64) {
	var touched uint64
	for _, e := range entries { // independent loads: their misses overlap
		touched ^= c.recs.All[e].hash.A
	}
	c.work.sink = touched
	for i, e := range entries {
		r := &c.recs.All[e]
		hashes[i] = c.seed.Hash(uint32(r.ident), r.hash)
	}
}

// find returns the entry of a key, visible or not; none if there is none.
func (c *core) find(id ident, b []byte) uint32 {
	k := offheap.KeyOf(b)
	return c.findWords(id, &k)
}

func (c *core) findWords(id ident, k *offheap.Key) uint32 {
	h := c.seed.Hash(uint32(id), *k)
	buckets, home := c.table.Side(h)
	return c.match(buckets, home, offheap.TagOf(h, home), id, k)
}

// match searches from bucket i on for the entry with this key.
func (c *core) match(buckets *offheap.Buckets, i int, tag uint32, id ident, k *offheap.Key) uint32 {
	for {
		var e uint32
		if e, i = buckets.Candidate(i, tag); e == none {
			return none
		}
		if r := &c.recs.All[e]; r.ident == id && r.hash == *k {
			return e
		}
		i++
	}
}

// held reports whether an entry is pinned, is being written, or is about to get a child.
func (c *core) held(e uint32) bool {
	return e == c.keep || c.recs.All[e].pins() > 0 || c.states.All[e].writing != 0
}

// deref returns the entry of a ref that is held by a pin or a reservation.
func (c *core) deref(ref pool.Ref) (e uint32, ok bool) {
	e = uint32(ref)
	if e == none || e >= c.high || c.states.All[e].serial != uint32(ref>>32) || !c.recs.All[e].is(flagLive) {
		return none, false
	}
	return e, true
}

func (c *core) ref(e uint32) pool.Ref {
	return pool.Ref(uint64(c.states.All[e].serial)<<32 | uint64(e))
}

// lookupRef returns the entry of a ref that need not be held, or none if it was dropped.
func (c *core) lookupRef(ref pool.Ref) uint32 {
	if e, ok := c.deref(ref); ok && !c.recs.All[e].is(flagDropped) {
		return e
	}
	return none
}

// record is the header of an entry: one cache line. Its index names it; 0 is none.
type record struct {
	hash  offheap.Key // the block hash, zero-padded
	ident ident
	hold  uint32 // pins<<pinShift | flags

	newer, older uint32 // in the entry's list: recent or partial; older links free records
	child        uint32 // first child
	next, prev   uint32 // siblings; prev of the first is its parent with upward set, and 0 in a root
	head         uint32 // slot of shard 0
}

// recordState is the part of a header that only reservations and references need.
type recordState struct {
	serial           uint32 // of the record; part of its refs; never 0 in use
	present, writing uint16 // shards
}

// ident is the rest of a key beside its hash: realm<<9 | group<<5 | hash length-1.
type ident uint32

const maxRealms = 1 << 23

func makeIdent(realm uint32, group uint8, hashLen int) ident {
	return ident(realm<<9 | uint32(group)<<5 | uint32(hashLen-1))
}

func (i ident) realm() uint32  { return uint32(i) >> 9 }
func (i ident) group() uint8   { return uint8(i>>5) & 15 }
func (i ident) hashLen() uint8 { return uint8(i)&31 + 1 }

const (
	none   = 0
	upward = 1 << 31 // in record.prev: a parent, not a sibling; in slotShard.link: an entry, not a slot

	pinShift = 13
	onePin   = 1 << pinShift
	maxPins  = 1<<19 - 1

	flagLive    = 1 << 0  // the record is an entry
	flagVisible = 1 << 1  // all shards are committed
	flagDropped = 1 << 2  // no longer findable; freed once it is not held
	flagRecent  = 1 << 3  // in the list of visible entries; only pinned ones may lack it
	flagPartial = 1 << 4  // in partial
	flagLifted  = 1 << 7  // placed above its children by lift, and not moved since
	flagRead    = 1 << 8  // all its pins are Acquire's
	flagUnused  = 1 << 9  // marked by MarkUnused, and not used since
	flagBrief   = 1 << 10 // of those: to be dropped by DropUnused
	flagDue     = 1 << 11 // of those: its time is over, and it is dropped once it has no children
	flagOwned   = 1 << 12 // it is in core.owners
	unused      = flagUnused | flagBrief | flagDue
)

func (r *record) pins() uint32        { return r.hold >> pinShift }
func (r *record) is(flag uint32) bool { return r.hold&flag != 0 }
