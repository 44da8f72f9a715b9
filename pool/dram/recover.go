package dram

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Recovery is what became of a pool's file when it was opened.
type Recovery struct {
	Path    string
	New     bool   // the file was not there
	Cold    string // why what was in it could not be used; empty: it was used, or the file is new
	Format  uint32 // that the file had
	Entries int    // visible again
	Spaces  int    // that they are of
	Damaged int    // slots whose header did not verify, or did not fit
	Stale   int    // slots of generations that are over
	Partial int    // entries, and shards without one, given up because not all shards were stored
	Notes   []string
	Took    time.Duration
}

// errClash is damage of a kind that no kill leaves behind: then nothing of the file is used.
var errClash = errors.New("its slabs overlap")

// restore makes the index of what the file holds.
func (c *core) restore(f *file, slabBytes int64, r *Recovery) error {
	byRecord := c.restoreSpaces(f, slabBytes, r)
	if err := c.restoreSlabs(f); err != nil {
		return err
	}
	s := scan{core: c, file: f, spaces: byRecord, decode: decoders[f.super.format]}
	if !s.prepare() {
		return errors.New("dram: no memory for the index")
	}
	s.slabs()
	for shard := range pool.MaxShards {
		if !s.attach(uint8(shard)) {
			return errors.New("dram: no memory for the index")
		}
	}
	r.Damaged, r.Stale = int(s.damaged.Load()), int(s.stale.Load())
	r.Partial = s.giveUpPartial() + s.strays
	c.openSlabs(s.claimed)
	c.restoreOrder(f)
	r.Entries = int(c.stats.Entries)
	return nil
}

// restoreSpaces gives the spaces of the file realms, as if they had been open. They get numbers when somebody opens them.
func (c *core) restoreSpaces(f *file, slabBytes int64, r *Recovery) []*space {
	out := make([]*space, f.spacesUsed())
	for n := range out {
		record := f.spaceAt(n)
		spec, ok := record.read()
		if !ok {
			if word(record, 0).Load() != 0 {
				r.Notes = append(r.Notes, fmt.Sprintf("space %d of the file is damaged, what is stored of it is gone", n))
				record.remove()
			}
			continue
		}
		if checkSpec(&spec, slabBytes) != nil || c.unopened[spec.Fingerprint] != nil {
			record.remove()
			continue
		}
		sp := c.newSpace(&spec)
		sp.record, sp.generation = n, record.generation()
		if !c.newRealm(sp) {
			continue
		}
		out[n], c.unopened[spec.Fingerprint] = sp, sp
		r.Spaces++
	}
	return out
}

// restoreSlabs cuts slabs as the file says. What it says of one slab alone is passed over if it is damaged.
func (c *core) restoreSlabs(f *file) error {
	s := &c.slabs
	for n := range s.slab {
		first, slotBytes, ok := readSlabWord(word(f.meta, f.slabAt(int32(n))).Load())
		if !ok || int64(slotBytes) > s.bytes || slotBytes == 0 {
			continue
		}
		id := s.classOf(slotBytes)
		if int64(first)+int64(s.class[id].perSlab) > int64(f.usable) {
			continue
		}
		b := &s.slab[n]
		*b = slab{class: id, last: id, cells: first, fresh: s.class[id].perSlab}
		if !s.spans.mark(first, b.fresh) {
			return errClash
		}
	}
	if !s.cells.grow(int(s.spans.high)) {
		return errors.New("dram: no memory for slots")
	}
	return nil
}

// scan reads all headers of a file. Slabs are read side by side, what was found is put in the index one after the other.
type scan struct {
	*core
	file           *file
	spaces         []*space // by record
	decode         decoder
	found          [][]uint32 // by slab: slots that hold a whole shard
	claimed        []uint64   // a bit for each cell
	shards         uint16     // that occur, a bit each; guarded by mu
	total          int        // guarded by mu
	damaged, stale atomic.Int64
	strays         int
	mu             sync.Mutex
}

func (s *scan) prepare() bool {
	s.found = make([][]uint32, len(s.core.slabs.slab))
	s.claimed = make([]uint64, s.core.slabs.spans.high/64+1)
	return true
}

// slabs reads the headers, with one goroutine for each processor.
func (s *scan) slabs() {
	var next atomic.Int64
	var done sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		done.Go(func() {
			for n := int(next.Add(1) - 1); n < len(s.found); n = int(next.Add(1) - 1) {
				if s.core.slabs.slab[n].class != noClass {
					s.slab(int32(n))
				}
			}
		})
	}
	done.Wait()
}

// slab reads the headers of one slab, and clears those that hold nothing that counts.
func (s *scan) slab(n int32) {
	b := &s.core.slabs.slab[n]
	var shards uint16
	for place := range b.fresh {
		h, slot := &s.file.headers[b.cells+place], uint32(n)<<s.core.slabs.slotBits|place
		if h.check.Load() == 0 {
			continue
		}
		if counter := s.judge(h, slot, b); counter != nil {
			counter.Add(1)
			h.check.Store(0)
			continue
		}
		shards |= 1 << h.shard()
		s.found[n] = append(s.found[n], slot)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shards |= shards
	s.total += len(s.found[n])
}

// judge says as what a header counts that is not to be used; nil if it is.
func (s *scan) judge(h *header, slot uint32, b *slab) *atomic.Int64 {
	if !s.decode(h, slot) || int(h.space) >= len(s.spaces) || s.spaces[h.space] == nil {
		return &s.damaged
	}
	sp := s.spaces[h.space]
	if h.generation != sp.generation {
		return &s.stale
	}
	group, shard := int(h.group()), int(h.shard())
	if group >= len(sp.groups) || shard >= sp.spec.Shards || h.hashLen < 1 || h.hashLen > pool.MaxHashLen ||
		h.length != sp.spec.Groups[group].ShardBytes[shard] || sp.groups[group].classes[shard] != b.class {
		return &s.damaged
	}
	return nil
}

// attach puts one shard of all entries in the index: shard 0 makes the entry, the others are hung on it in their order.
func (s *scan) attach(shard uint8) bool {
	if s.shards&(1<<shard) == 0 {
		return true
	}
	if shard == 0 && !s.makeTable() {
		return false
	}
	for n, slots := range s.found {
		first := s.core.slabs.slab[n].cells
		for _, slot := range slots {
			place := slot & (1<<s.core.slabs.slotBits - 1)
			h := &s.file.headers[first+place]
			if h.shard() != shard {
				continue
			}
			if !s.attachOne(h, slot) {
				h.check.Store(0)
				s.stray(shard)
			}
		}
	}
	return true
}

// stray counts a shard that belongs to no entry: one whose shard 0 was cleared already when the process was killed in the middle
// of an eviction. Two slots with one key would be damage.
func (s *scan) stray(shard uint8) {
	if shard == 0 {
		s.damaged.Add(1)
		return
	}
	s.strays++
}

// makeTable makes a hash table that need not grow while it is filled.
func (s *scan) makeTable() bool {
	size := max(firstCells, s.total*loadDen/loadNum+s.total/8)
	t, err := mapCells(size)
	if err != nil {
		return false
	}
	old := s.table.now
	s.table.now = t
	return old.close() == nil
}

func (s *scan) attachOne(h *header, slot uint32) bool {
	c := s.core
	sp := s.spaces[h.space]
	id := makeIdent(sp.realm, h.group(), int(h.hashLen))
	e := c.findWords(id, &h.hash)
	shard := int(h.shard())
	if shard == 0 {
		if e != none {
			return false
		}
		if e = c.restoreEntry(id, h.hash, slot); e == none {
			return false
		}
	} else {
		if e == none || c.lives.all[e].present != 1<<shard-1 {
			return false
		}
		_, last := c.shardCell(c.recs.all[e].head, shard-1)
		last.link = slot
		c.lives.all[e].present |= 1 << shard
	}
	*c.slabs.at(slot) = cell{link: e | upward, sum: h.sum}
	s.claim(slot)
	return true
}

// restoreEntry makes an entry that has shard 0.
func (c *core) restoreEntry(id ident, k key, slot uint32) uint32 {
	e := c.newRecord()
	if e == none {
		return none
	}
	c.table.grow(c.hashes)
	if !c.table.put(c.seed.hash(id, k), e) {
		c.freeRecord(e)
		return none
	}
	r := &c.recs.all[e]
	r.hash, r.ident, r.hold, r.head = k, id, flagLive, slot
	c.lives.all[e].present = 1
	c.realms[id.realm()].entries++
	c.stats.Partial++
	return e
}

func (s *scan) claim(slot uint32) {
	b := &s.core.slabs.slab[slot>>s.core.slabs.slotBits]
	at := b.cells + slot&(1<<s.core.slabs.slotBits-1)
	s.claimed[at/64] |= 1 << (at % 64)
	b.used++
}

func (s *scan) unclaim(slot uint32) {
	b := &s.core.slabs.slab[slot>>s.core.slabs.slotBits]
	at := b.cells + slot&(1<<s.core.slabs.slotBits-1)
	s.claimed[at/64] &^= 1 << (at % 64)
	b.used--
	s.file.headers[at].check.Store(0)
}

// giveUpPartial frees the entries that lack shards: the engine saves them again.
func (s *scan) giveUpPartial() (n int) {
	c := s.core
	for e := uint32(1); e < c.high; e++ {
		r := &c.recs.all[e]
		if !r.is(flagLive) || c.lives.all[e].present == c.group(r.ident).full {
			continue
		}
		slot := r.head
		for range bits.OnesCount16(c.lives.all[e].present) {
			next := c.slabs.at(slot).link
			s.unclaim(slot)
			slot = next
		}
		c.table.remove(c.seed.hash(r.ident, r.hash), e)
		c.stats.Partial--
		c.leaveRealm(r.ident.realm())
		c.freeRecord(e)
		n++
	}
	return n
}
