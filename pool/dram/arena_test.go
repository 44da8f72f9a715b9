package dram

import (
	"math"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

func TestArenaIsZeroAndSharedAndPopulated(t *testing.T) {
	p, err := Open(Options{Bytes: 3 << 20, SlabBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	base, fd := p.Arena()
	other, err := unix.Mmap(fd, 0, len(base), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(other)
	base[1<<20] = 7
	if err := p.Populated(); err != nil {
		t.Fatal(err)
	}
	if other[1<<20] != 7 {
		t.Error("what is written is not seen through the descriptor, or populating overwrote it")
	}
	other = other[1<<20+1:]
	for i, b := range other {
		if b != 0 {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
	if s := p.Stats(); s.Ready != 3<<20 || s.Capacity != 3<<20 {
		t.Errorf("%d of %d bytes ready", s.Ready, s.Capacity)
	}
	if i := p.Info(); i.PageBytes == arena.PageBytes && i.PageReason == "" {
		t.Errorf("small pages, and no reason: %+v", i)
	}
}

func TestClosedPoolFindsNothing(t *testing.T) {
	p := filled(t, 1024)
	h := randomChain(nil, 0, 128)
	_, refs, _ := p.Pin(0, 0, h, 1<<30, nil)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != pool.ErrClosed {
		t.Errorf("second close: %v", err)
	}
	p.Unpin(refs)
	b := pool.Batch{Epoch: 1, Hashes: h, Status: make([]pool.Status, 128), Slots: make([]pool.Slot, 128)}
	p.Reserve(&b)
	p.Acquire(&b)
	p.Commit(b.Slots, 1, b.Status)
	p.Release(b.Slots, b.Status)
	if p.Prefix(0, 0, h) != 0 || p.Epoch(0) != 0 {
		t.Error("a closed pool answers")
	}
	if _, err := p.OpenSpace(
		pool.Spec{Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{1}}}},
	); err != pool.ErrClosed {
		t.Errorf("open space: %v", err)
	}
	p.Stats()
}

// flipByte flips one bit in the middle of the nth entry from the most recently used one on.
func flipByte(t *testing.T, p *Pool, nth int) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.core.recent.newest
	for range nth {
		e = p.core.recs.All[e].older
	}
	if e == none {
		t.Fatalf("no unpinned entry %d is stored", nth)
	}
	s := p.core.slot(e, 0)
	p.base[s.Off+int64(s.Len)/2] ^= 1
}

func TestFlippedByteIsCorrupt(t *testing.T) {
	p, err := Open(Options{Bytes: 64 << 10, SlabBytes: 16 << 10})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	store := newStore(t, p, pool.Spec{Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{1000}}}})
	items := []pool.Item{
		{Key: pool.Key{Hash: pool.MakeHash([]byte{1})}, Data: make([]byte, 1000)},
		{Key: pool.Key{Hash: pool.MakeHash([]byte{2})}, Data: make([]byte, 1000)},
	}
	if err := store.Put(t.Context(), items); err != nil {
		t.Fatal(err)
	}
	flipByte(t, p, 1)
	if err := store.Get(t.Context(), items); err != nil {
		t.Fatal(err)
	}
	if items[0].Status != pool.Corrupt || items[1].Status != pool.OK {
		t.Fatalf("statuses %d and %d, want Corrupt for the older one", items[0].Status, items[1].Status)
	}
}

// TestSlotOfAnotherEntryIsCorrupt plays an index of which two entries' slots were confused.
func TestSlotOfAnotherEntryIsCorrupt(t *testing.T) {
	p := filled(t, 2)
	defer p.Close()
	b := pool.Batch{
		Epoch: 1, Hashes: randomChain(nil, 0, 2), Status: make([]pool.Status, 2), Slots: make([]pool.Slot, 2),
	}
	swap := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		newest := &p.core.recs.All[p.core.recent.newest]
		older := &p.core.recs.All[newest.older]
		newest.head, older.head = older.head, newest.head
	}
	swap()
	p.Acquire(&b)
	for i, status := range b.Status {
		if status != pool.Corrupt {
			t.Errorf("block %d: served from another entry's slot, status %d", i, status)
		}
	}
	swap()
	if p.Acquire(&b); b.Status[0] != pool.OK || b.Status[1] != pool.OK {
		t.Errorf("statuses %v with the slots as they were", b.Status)
	}
	p.Release(b.Slots, b.Status)
}

// TestIndexIsSmall holds what an entry costs in memory beside its blocks.
func TestIndexIsSmall(t *testing.T) {
	for _, n := range []int{10_000, 100_000, 700_000} {
		if per := float64(residentIndex(t, filled(t, n))) / float64(n); per > 100 {
			t.Errorf("%d blocks: %.1f bytes each, allowed are 100", n, per)
		}
	}
}

// TestIndexOfShardsIsSmall holds what an entry of eight shards costs beyond its header.
func TestIndexOfShardsIsSmall(t *testing.T) {
	const entries, shards, allowed = 100_000, 8, 160
	p, err := Open(Options{Bytes: entries * shards * 1152, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	id, err := p.OpenSpace(pool.Spec{Shards: shards,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: slices.Repeat([]uint32{1024}, shards)}}})
	if err != nil {
		t.Fatal(err)
	}
	for first := 0; first < entries; first += benchChainLen {
		h := randomChain(nil, first, min(benchChainLen, entries-first))
		for shard := range uint8(shards) {
			b := pool.Batch{Space: id, Epoch: 1, Shard: shard, Hashes: h, Status: make([]pool.Status, h.N),
				Slots: make([]pool.Slot, h.N)}
			p.Reserve(&b)
			p.Commit(b.Slots, 1, b.Status)
		}
	}
	if n := p.SpaceEntries(id); n != entries {
		t.Fatalf("%d entries are stored, want %d", n, entries)
	}
	if per := float64(residentIndex(t, p)) / entries; per > allowed {
		t.Errorf("%.1f bytes for an entry of %d shards, allowed are %d", per, shards, allowed)
	}
}

// residentIndex returns the memory of all of a pool but its arena.
func residentIndex(t *testing.T, p *Pool) int64 {
	c, slots := p.core, p.info.Bytes/arena.SlotUnit
	n := resident(t, c.recs.All) + resident(t, c.states.All) +
		resident(t, unsafe.Slice(c.slabs.at(0), slots)) + resident(t, unsafe.Slice(c.slabs.state(0), slots))
	now, _ := c.table.Side(0)
	old, _ := c.table.Side(math.MaxUint64)
	if n += resident(t, now.Bucket); old != now {
		n += resident(t, old.Bucket)
	}
	return n
}

func resident[T any](t *testing.T, all []T) (n int64) {
	bytes := len(all) * int(unsafe.Sizeof(all[0]))
	pages := make([]byte, (bytes+arena.PageBytes-1)/arena.PageBytes)
	_, _, errno := unix.Syscall(
		unix.SYS_MINCORE, uintptr(unsafe.Pointer(&all[0])), uintptr(bytes), uintptr(unsafe.Pointer(&pages[0])),
	)
	if errno != 0 {
		t.Fatal(errno)
	}
	for _, p := range pages {
		n += int64(p&1) * arena.PageBytes
	}
	return n
}

func TestHotPathsDoNotAllocate(t *testing.T) {
	p := filled(t, 10_000)
	h := randomChain(nil, 3, 128)
	b := pool.Batch{Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
	refs, present := make([]pool.Ref, 0, h.N), make([]bool, h.N)
	for name, f := range map[string]func(){
		"Prefix":  func() { p.Prefix(0, 0, h) },
		"Exists":  func() { p.Exists(0, 0, h, present) },
		"Pin":     func() { _, pinned, _ := p.Pin(0, 0, h, 1<<30, refs); p.Unpin(pinned) },
		"Acquire": func() { p.Acquire(&b); p.Release(b.Slots, b.Status) },
		"Reserve": func() { p.Reserve(&b); p.Commit(b.Slots, 1, b.Status) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s allocates %.0f times", name, n)
		}
	}
}
