package dram

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
	"github.com/kvagent/kvagent/pool/dram/slab"
)

// Recovery is the result of opening a pool's file.
type Recovery struct {
	Path    string
	New     bool   // the file did not exist
	Cold    string // why its content could not be used; empty: it was used, or the file is new
	Entries int    // restored entries
	Spaces  int    // their spaces
	Damaged int    // slots whose header did not verify or did not fit
	Stale   int    // slots of past generations
	Lost    int    // headers that cannot be read because their pages went bad
	Partial int    // entries, and shards without one, dropped because not all shards were stored
	Notes   []string

	BadPages int // of the arena, retired by earlier processes
	Took     time.Duration
}

// errLost is a page outside the arena that went bad during its second reading: nothing of the file
// is used then.
var errLost = errors.New("a page of its index went bad while it was read")

// restore builds the index of what the file holds.
func (c *core) restore(f *arena.File, slabBytes int64, r *Recovery) error {
	byRecord := c.restoreSpaces(f, slabBytes, r)
	if err := c.slabs.Restore(); err != nil {
		return err
	}
	s := scan{
		core: c, spaces: byRecord, found: make([][]uint32, c.slabs.Count()), claimed: c.slabs.NewClaims(),
	}
	s.readAll()
	for shard := range pool.MaxShards {
		if !s.attach(uint8(shard)) {
			return errors.New("dram: no memory for the index")
		}
	}
	r.Damaged, r.Stale, r.Lost = int(s.damaged.Load()), int(s.stale.Load()), int(s.lost.Load())
	r.Partial = s.giveUpPartial() + s.strays
	c.slabs.Open(s.claimed)
	c.restoreOrder()
	r.Entries = int(c.stats.Entries)
	return nil
}

// restoreSpaces makes realms for the spaces of the file, as if they had been open. OpenSpace gives
// them IDs.
func (c *core) restoreSpaces(f *arena.File, slabBytes int64, r *Recovery) []*space {
	out := make([]*space, f.SpacesUsed())
	for n := range out {
		record := f.SpaceAt(n)
		var spec pool.Spec
		var ok bool
		var generation uint32
		if !f.Touch(func() { spec, ok = record.Read(); generation = record.Generation() }) {
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
		sp.record, sp.generation = n, generation
		if !c.newRealm(sp) {
			continue
		}
		out[n], c.unopened[spec.Fingerprint] = sp, sp
		r.Spaces++
	}
	return out
}

// scan reads all headers of a file. Slabs are read in parallel; the entries found are added to the
// index sequentially.
type scan struct {
	*core
	spaces         []*space   // by record
	found          [][]uint32 // by slab: slots that hold a whole shard and are not attached, by shard
	claimed        slab.Claims
	shards         shardSet // that occur; guarded by mu
	total          int      // guarded by mu
	damaged, stale atomic.Int64
	lost           atomic.Int64
	strays         int
	mu             sync.Mutex
}

// readAll reads the headers, with one goroutine for each processor.
func (s *scan) readAll() {
	var next atomic.Int64
	var done sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		done.Go(func() {
			for n := int(next.Add(1) - 1); n < len(s.found); n = int(next.Add(1) - 1) {
				s.readSlab(int32(n)) // none, if it is not cut
			}
		})
	}
	done.Wait()
}

// readSlab reads the headers of one slab, and clears those that are not used.
func (s *scan) readSlab(n int32) {
	var found slabScan
	first, end := s.slabs.Slots(n)
	s.lost.Add(s.file.TouchEach(first, end, func(slot uint32) {
		if h := s.header(slot); s.whole(h, slot) {
			found.add(slot, h.Shard())
		}
	}))
	s.found[n] = found.byShard()
	s.mu.Lock()
	defer s.mu.Unlock()
	for shard, n := range found.counts {
		if n > 0 {
			s.shards.add(uint8(shard))
		}
	}
	s.total += len(found.slots)
}

// slabScan is what was found in one slab.
type slabScan struct {
	slots  []uint32
	shards []uint8 // of the slots
	counts [pool.MaxShards]int
}

func (s *slabScan) add(slot uint32, shard uint8) {
	s.slots, s.shards = append(s.slots, slot), append(s.shards, shard)
	s.counts[shard]++
}

// byShard returns the slots ordered by shard, and those of one shard as they were found.
func (s *slabScan) byShard() []uint32 {
	if len(s.slots) == 0 || s.counts[s.shards[0]] == len(s.slots) {
		return s.slots
	}
	at, next := [pool.MaxShards]int{}, 0
	for shard, n := range s.counts {
		at[shard], next = next, next+n
	}
	out := make([]uint32, len(s.slots))
	for i, slot := range s.slots {
		shard := s.shards[i]
		out[at[shard]] = slot
		at[shard]++
	}
	return out
}

// whole reports whether a slot holds a whole shard that is to be used, and clears its header if
// not.
func (s *scan) whole(h *arena.Header, slot uint32) bool {
	if h.Check.Load() == 0 {
		return false
	}
	if s.slabs.IsBad(slot) { // its page was retired
		h.Check.Store(0)
		return false
	}
	if counter := s.judge(h, slot); counter != nil {
		counter.Add(1)
		h.Check.Store(0)
		return false
	}
	return true
}

// judge returns the counter of a header that is not to be used; nil if it is.
func (s *scan) judge(h *arena.Header, slot uint32) *atomic.Int64 {
	if !h.Whole(slot) || h.Space() >= len(s.spaces) || s.spaces[h.Space()] == nil {
		return &s.damaged
	}
	sp := s.spaces[h.Space()]
	if h.Generation != sp.generation {
		return &s.stale
	}
	group, shard := int(h.Group()), int(h.Shard())
	if group >= len(sp.groups) || shard >= sp.spec.Shards || h.HashLen < 1 || h.HashLen > pool.MaxHashLen ||
		h.Length != sp.spec.Groups[group].ShardBytes[shard] ||
		sp.groups[group].classes[shard] != s.slabs.ClassAt(slot) {
		return &s.damaged
	}
	return nil
}
