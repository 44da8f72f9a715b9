package dram

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/offheap"
)

// Recovery is the result of opening a pool's file.
type Recovery struct {
	Path    string
	New     bool   // the file did not exist
	Cold    string // why its content could not be used; empty: it was used, or the file is new
	Entries int    // restored entries
	Spaces  int    // their spaces
	Damaged int    // slots whose header did not verify or did not fit
	Stale   int    // slots of past turns
	Lost    int    // headers that cannot be read because their pages went bad
	Partial int    // entries dropped because not all shards were stored
	Notes   []string
	Took    time.Duration
}

// errLost is a page of the index that went bad right after it was read. The next start finds it.
var errLost = errors.New("dram: a page of the pool's index went bad during the start")

// restore builds the index of what the file holds.
func (c *core) restore(f *arena.File, slabBytes int64, r *Recovery) {
	byRecord := c.restoreSpaces(f, slabBytes, r)
	c.slabs.restore()
	s := scan{core: c, recovery: r, spaces: byRecord, found: make([][]uint64, len(c.slabs.slab))}
	for n := range s.found {
		s.readSlab(int32(n)) // none, if it is not cut
	}
	c.table.Reserve(s.first) // to grow would take a third of the start
	for shard := range pool.MaxShards {
		s.attach(uint8(shard))
	}
	r.Partial = s.giveUpPartial()
	c.restoreOrder()
	r.Entries = int(c.stats.Entries)
}

// restoreSpaces makes realms for the spaces of the file, which get their IDs by OpenSpace.
func (c *core) restoreSpaces(f *arena.File, slabBytes int64, r *Recovery) []*space {
	out := make([]*space, f.SpacesUsed())
	for n := range out {
		record := f.SpaceAt(n)
		var spec pool.Spec
		var ok bool
		var turn uint32
		if !f.Touch(func() { spec, ok = record.Read(); turn = record.Turn() }) {
			note := fmt.Sprintf("space %d of the file cannot be read: its blocks are lost", n)
			r.Notes = append(r.Notes, note)
			continue
		}
		if !ok {
			if record.Used() {
				r.Notes = append(
					r.Notes, fmt.Sprintf("space %d of the file is damaged: its blocks are lost", n),
				)
				record.Remove()
			}
			continue
		}
		if checkSpec(&spec, slabBytes) != nil || c.unopened[spec.Fingerprint] != nil {
			record.Remove()
			continue
		}
		sp := c.newSpace(&spec)
		sp.record, sp.turn = n, turn
		if !c.newRealm(sp) {
			continue
		}
		out[n], c.unopened[spec.Fingerprint] = sp, sp
		r.Spaces++
	}
	return out
}

// scan reads all headers of a file, and then adds the entries one by one.
type scan struct {
	*core
	recovery *Recovery
	first    int        // slots found that hold shard 0
	spaces   []*space   // by record
	found    [][]uint64 // by slab: slots that hold a whole shard and are not attached, below their shards; sorted
}

// readSlab reads the headers of one slab, and frees the slots that hold no whole shard.
func (s *scan) readSlab(n int32) {
	first, end := s.slabs.slots(n)
	s.recovery.Lost += int(s.file.TouchEach(first, end, func(slot uint32) {
		if h := s.header(slot); s.whole(h, slot) {
			s.found[n] = append(s.found[n], uint64(h.Shard)<<32|uint64(slot))
			if h.Shard == 0 {
				s.first++
			}
			s.slabs.at(slot).link = upward // not free, and not attached yet
		}
	}))
	slices.Sort(s.found[n])
	for slot := end; slot > first; slot-- {
		if s.slabs.at(slot-1).link == 0 {
			s.slabs.give(slot - 1)
		}
	}
}

// whole reports whether a slot holds a whole shard to be used, and else clears its header.
func (s *scan) whole(h *arena.Header, slot uint32) bool {
	switch {
	case h.Check.Load() == 0:
		return false
	case !s.fits(h, slot):
		s.recovery.Damaged++
	case h.Turn != s.spaces[int(h.Space)].turn:
		s.recovery.Stale++
	default:
		return true
	}
	h.Check.Store(0)
	return false
}

// fits reports whether a header is whole, and its space has such a shard.
func (s *scan) fits(h *arena.Header, slot uint32) bool {
	if !h.Whole(slot) || int(h.Space) >= len(s.spaces) || s.spaces[int(h.Space)] == nil {
		return false
	}
	sp, group, shard := s.spaces[int(h.Space)], int(h.Group), int(h.Shard)
	return group < len(sp.groups) && shard < sp.spec.Shards && h.HashLen >= 1 && h.HashLen <= pool.MaxHashLen &&
		sp.groups[group].classes[shard] == s.slabs.classAt(slot)
}

// attach adds one shard of all entries to the index: shard 0 makes the entry, the others are linked
// to it in order. A shard is left over if its shard 0 had been cleared when the process was killed
// during an eviction, or if it had been copied when it was killed during a move.
func (s *scan) attach(shard uint8) {
	for n := range s.found {
		for ; len(s.found[n]) > 0 && uint8(s.found[n][0]>>32) == shard; s.found[n] = s.found[n][1:] {
			slot := uint32(s.found[n][0])
			if h := s.header(slot); !s.attachOne(h, slot) {
				h.Check.Store(0)
				s.slabs.give(slot)
			}
		}
	}
}

func (s *scan) attachOne(h *arena.Header, slot uint32) bool {
	c := s.core
	sp := s.spaces[int(h.Space)]
	id := makeIdent(sp.realm, h.Group, int(h.HashLen))
	k := offheap.KeyOfWords(&h.Hash)
	e := c.findWords(id, &k)
	shard := h.Shard
	if shard == 0 {
		if e != none {
			return false
		}
		if e = c.restoreEntry(id, k, slot); e == none {
			return false
		}
	} else {
		if e == none || c.states.All[e].present != uint16(shard) { // all before it: they are added in order
			return false
		}
		_, last := c.shardSlot(c.recs.All[e].head, int(shard)-1)
		last.link = slot
	}
	c.states.All[e].present++
	*c.slabs.state(slot) = shardPresent
	*c.slabs.at(slot) = slotShard{link: e | upward, sum: h.Sum}
	return true
}

// restoreEntry makes an entry that has shard 0.
func (c *core) restoreEntry(id ident, k offheap.Key, slot uint32) uint32 {
	e := c.newRecord()
	c.table.Grow(c.hashes)
	if !c.table.Put(c.seed.Hash(uint32(id), k), e) {
		c.freeRecord(e)
		return none
	}
	r := &c.recs.All[e]
	r.hash, r.ident, r.hold, r.head = k, id, flagLive, slot
	c.realms[id.realm()].entries++
	c.stats.Partial++
	return e
}

// giveUpPartial drops the entries that lack shards; the engine saves them again.
func (c *core) giveUpPartial() (n int) {
	for e := uint32(1); e < c.high; e++ {
		if r := &c.recs.All[e]; r.is(flagLive) && c.states.All[e].present != c.group(r.ident).full {
			c.drop(e, 0)
			n++
		}
	}
	return n
}

// restoreOrder makes all entries visible, links them to their parents, and orders them by use.
func (c *core) restoreOrder() {
	f := c.file
	used := make([]uint32, c.high)
	f.TouchEach(1, c.high, func(e uint32) {
		if c.recs.All[e].is(flagLive) {
			used[e] = c.header(c.recs.All[e].head).Used.Load()
		}
	})
	order := make([]uint64, 0, c.stats.Partial)
	for e := uint32(1); e < c.high; e++ {
		if c.recs.All[e].is(flagLive) {
			f.AtLeast(used[e])
			order = append(order, uint64(used[e])<<32|uint64(e))
		}
	}
	slices.Sort(order)
	c.restoreChains()
	for from := 0; from < len(order); {
		to := from
		for to < len(order) && order[to]>>32 == order[from]>>32 {
			to++
		}
		c.restoreTick(order[from:to])
		from = to
	}
}

// restoreTick restores the entries of one tick. The first stored are nearest to the beginning of
// their chain, and are evicted last.
func (c *core) restoreTick(order []uint64) {
	for i := len(order) - 1; i >= 0; i-- {
		e := uint32(order[i])
		c.recs.All[e].hold |= flagVisible
		c.stats.Partial--
		c.stats.Entries++
		c.recent.push(c.recs.All, e)
	}
	if c.advisor == nil {
		return
	}
	for _, o := range order {
		// Parts of chains are passed to the policy one by one: it learns from their lengths.
		if e := uint32(o); len(c.shown) > 0 && c.recs.All[e].prev != c.shown[len(c.shown)-1]|upward {
			c.announce()
		}
		c.shown = append(c.shown, uint32(o))
	}
	c.announce()
}

// Marks of a walk up the chains.
const (
	markNone = iota
	markUnderWay
	markDone
)

// restoreChains links entries to their parents, where these exist and no cycle results.
func (c *core) restoreChains() {
	parents := make([]uint32, c.high)
	c.file.TouchEach(1, c.high, func(e uint32) {
		if c.recs.All[e].is(flagLive) {
			parents[e] = c.restoredParent(e)
		}
	})
	marks := make([]uint8, c.high)
	for e := uint32(1); e < c.high; e++ {
		cutCircle(parents, marks, e)
	}
	for e := c.high - 1; e > none; e-- {
		if p := parents[e]; p != none {
			c.linkRoot(e, p)
		}
	}
}

// restoredParent returns the entry whose slot and tag e was stored with; none if it is not stored.
func (c *core) restoredParent(e uint32) uint32 {
	w := c.header(c.recs.All[e].head).Parent.Load()
	slot := uint32(w>>32) - 1
	if w == 0 || int(slot) >= len(c.slabs.states.All) || *c.slabs.state(slot) != shardPresent {
		return none
	}
	p := c.owner(slot)
	r := &c.recs.All[p]
	if p == e || r.head != slot || r.ident != c.recs.All[e].ident || r.hash.Tag() != uint32(w) {
		return none
	}
	return p
}

// cutCircle walks up from e and makes a root of an entry that the walk returns to.
func cutCircle(parents []uint32, marks []uint8, e uint32) {
	last := uint32(none)
	for at := e; at != none && marks[at] != markDone; at = parents[at] {
		if marks[at] == markUnderWay {
			parents[last] = none
			break
		}
		marks[at] = markUnderWay
		last = at
	}
	for at := e; at != none && marks[at] == markUnderWay; at = parents[at] {
		marks[at] = markDone
	}
}

// linkRoot links a root to a parent, for a pair that is known to make no cycle.
func (c *core) linkRoot(child, parent uint32) {
	recs := c.recs.All
	r, p := &recs[child], &recs[parent]
	r.prev, r.next = parent|upward, p.child
	if p.child != none {
		recs[p.child].prev = child
	}
	p.child = child
}
