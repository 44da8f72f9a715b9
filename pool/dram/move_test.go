package dram

import (
	"bytes"
	"sync"
	"testing"
	"unsafe"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// moveSpec has two shards of different sizes.
var moveSpec = pool.Spec{
	Fingerprint: pool.Fingerprint{7}, Identity: []byte("moved"), Shards: 2,
	Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{1000, 3000}}},
}

// fillShard writes the hash of each block of a batch that was reserved or acquired over its slot.
func fillShard(p *Pool, b *pool.Batch) {
	for i, s := range b.Slots {
		if b.Status[i] == pool.OK {
			for at := int64(0); at < int64(s.Len); {
				at += int64(copy(p.base[s.Off+at:s.Off+int64(s.Len)], b.Hashes.At(i)))
			}
		}
	}
}

func shardBatch(id pool.SpaceID, h pool.Hashes, shard uint8) *pool.Batch {
	return &pool.Batch{
		Space: id, Shard: shard, Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
}

func storeShard(p *Pool, id pool.SpaceID, h pool.Hashes, shard uint8) {
	b := shardBatch(id, h, shard)
	p.Reserve(b)
	fillShard(p, b)
	p.Commit(b.Slots, 1, b.Status)
}

// wantShards wants every shard of a chain stored, with its bytes.
func wantShards(t *testing.T, p *Pool, id pool.SpaceID, h pool.Hashes) {
	t.Helper()
	for shard := range uint8(2) {
		b := shardBatch(id, h, shard)
		p.Acquire(b)
		for i, s := range b.Slots {
			if b.Status[i] != pool.OK {
				t.Fatalf("block %d: status %d", i, b.Status[i])
			}
			if got := p.base[s.Off:][:s.Len]; !bytes.Equal(got[:pool.MaxHashLen], h.At(i)) ||
				!bytes.Equal(got[len(got)-8:], tail(h.At(i), len(got))) {
				t.Fatalf("moved bytes are wrong: block %d, shard %d", i, shard)
			}
		}
		p.Release(b.Slots, b.Status)
	}
	check(t, p)
}

// tail is the last 8 bytes of so many that repeat a hash.
func tail(hash []byte, n int) []byte { return bytes.Repeat(hash, n/len(hash)+1)[n-8 : n] }

// openMovable is a pool with a chain of 6 blocks, and one more block, for whose shards there is
// room in other slabs.
func openMovable(t *testing.T, path string) (*Pool, pool.SpaceID, pool.Hashes) {
	t.Helper()
	o := Options{Bytes: 128 << 10, SlabBytes: 16 << 10, Path: path}
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.OpenSpace(moveSpec)
	if err != nil {
		t.Fatal(err)
	}
	before, h, after := randomChain(nil, 1, 10), randomChain(nil, 3, 6), randomChain(nil, 2, 6)
	for _, chain := range []pool.Hashes{before, h, after} {
		storeShard(p, id, chain, 0)
		storeShard(p, id, chain, 1)
	}
	var keys []pool.Key
	for _, chain := range []pool.Hashes{before, after.Slice(0, 4), after.Slice(5, 6)} {
		for i := range chain.N {
			keys = append(keys, pool.Key{Space: moveSpec.Fingerprint, Hash: pool.MakeHash(chain.At(i))})
		}
	}
	if err := newStore(t, p, moveSpec).Delete(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	return p, id, h
}

// plan begins to empty the slab in which a shard of the chain's first block lies.
func plan(t *testing.T, p *Pool, id pool.SpaceID, h pool.Hashes, shard uint8) []tenant {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	ident, _, _ := c.identOf(id, 0, h.Len)
	slot, _ := c.shardCell(c.recs.All[c.find(ident, h.At(0))].head, int(shard))
	n := c.slabs.SlabOf(slot)
	tenants, ok := c.survey(n, nil)
	if !ok {
		t.Fatal("a slab in which nothing is held cannot be emptied")
	}
	if c.slabs.Free(c.slabs.ClassAt(slot)) == 0 || c.slabs.SlabsOf(c.slabs.ClassAt(slot)) < 2 {
		t.Fatal("no other slab to move to")
	}
	c.slabs.Drain(n)
	return tenants
}

// copyPlanned copies the bytes of what planMoves has chosen.
func copyPlanned(p *Pool) {
	for _, m := range p.core.moving {
		copy(p.base[m.at:][:m.bytes], p.base[m.from:][:m.bytes])
	}
}

// TestMovedWhileItIsRead checks that an entry pinned while it is copied stays in its old slot.
func TestMovedWhileItIsRead(t *testing.T) {
	p, id, h := openMovable(t, "")
	defer p.Close()
	tenants := plan(t, p, id, h, 1)
	if _, _, full := p.planMoves(tenants, nil); full || len(p.core.moving) == 0 {
		t.Fatalf("%d moves planned, no room %v", len(p.core.moving), full)
	}
	check(t, p)
	read := shardBatch(id, h, 1)
	p.Acquire(read)
	copyPlanned(p)
	if held := p.settleMoves(nil); len(held) != len(tenants) {
		t.Errorf("moved while it is read: %d of %d entries stayed", len(held), len(tenants))
	}
	again := shardBatch(id, h, 1)
	p.Acquire(again)
	for i := range read.Slots {
		if read.Slots[i].Off != again.Slots[i].Off {
			t.Errorf("moved while it is read: block %d lies at %d, its reader has %d",
				i, again.Slots[i].Off, read.Slots[i].Off)
		}
	}
	p.Release(again.Slots, again.Status)
	p.Release(read.Slots, read.Status)
	p.endEmpty(slabOf(p, tenants))
	wantShards(t, p, id, h)
}

func slabOf(p *Pool, tenants []tenant) int32 {
	return p.core.slabs.SlabOf(tenants[0].slot)
}

// TestGoneWhileItMoves drops entries, and stores one of them again, while they are copied.
func TestGoneWhileItMoves(t *testing.T) {
	p, id, h := openMovable(t, "")
	defer p.Close()
	tenants := plan(t, p, id, h, 0)
	p.planMoves(tenants, nil)
	planned := len(p.core.moving)
	keys := []pool.Key{
		{Space: moveSpec.Fingerprint, Hash: pool.MakeHash(h.At(5))},
		{Space: moveSpec.Fingerprint, Hash: pool.MakeHash(h.At(4))},
	}
	if err := newStore(t, p, moveSpec).Delete(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	copyPlanned(p)
	again := h.Slice(4, 5)
	storeShard(p, id, again, 0)
	storeShard(p, id, again, 1)
	if held := p.settleMoves(nil); len(held) != 0 {
		t.Errorf("%d entries are said to be held", len(held))
	}
	if moved := p.Stats().Moved; planned != 6 || moved != 4 {
		t.Errorf("%d of %d planned moves were made, want 4 of 6", moved, planned)
	}
	p.endEmpty(slabOf(p, tenants))
	wantShards(t, p, id, h.Slice(0, 5))
}

// TestCommittedWhileItMoves commits the missing shard of an entry while its slots, one without
// bytes, are copied.
func TestCommittedWhileItMoves(t *testing.T) {
	p, id, _ := openMovable(t, "")
	defer p.Close()
	h := randomChain(nil, 4, 4)
	storeShard(p, id, h, 0)
	p.mu.Lock()
	c := p.core
	ident, _, _ := c.identOf(id, 0, h.Len)
	slot, _ := c.shardCell(c.recs.All[c.find(ident, h.At(0))].head, 1)
	n := c.slabs.SlabOf(slot)
	tenants, _ := c.survey(n, nil)
	c.slabs.Drain(n)
	tenants, _, _ = c.planMoves(tenants, nil)
	planned := len(c.moving)
	p.mu.Unlock()
	copyPlanned(p)
	storeShard(p, id, h, 1)
	p.settleMoves(nil)
	p.endEmpty(n)
	if planned == 0 {
		t.Fatalf("nothing was to be moved, %d left", len(tenants))
	}
	wantShards(t, p, id, h)
}

// TestKilledWhileItMoves opens the file of a process that was killed while it moved an entry:
// before its new header is written, while both are there, and after the old one is cleared.
func TestKilledWhileItMoves(t *testing.T) {
	for at, stage := range []string{"before the new header", "with both headers", "after the move"} {
		for shard := range uint8(2) {
			path := shmPath(t)
			p, id, h := openMovable(t, path)
			tenants := plan(t, p, id, h, shard)
			p.planMoves(tenants, nil)
			copyPlanned(p)
			p.mu.Lock()
			c := p.core
			for i := range c.moving {
				m := &c.moving[i]
				from := c.header(m.slot)
				check := from.Check.Load()
				if at > 0 {
					e, _ := c.locate(&m.tenant)
					if shard == 0 {
						c.recs.All[e].head = m.to
					}
					c.persistMove(e, m)
				}
				if at > 0 && from.Check.Load() != 0 {
					t.Error("moved, and the old header is not clear")
				}
				if at == 1 {
					from.Check.Store(check)
				}
			}
			p.mu.Unlock()
			leave(t, p)
			p = reopen(t, Options{Bytes: 128 << 10, SlabBytes: 16 << 10, Path: path})
			if r := p.Info().Recovery; r.Entries != 7 || r.Damaged != 0 || r.Partial != 0 || len(r.Notes) != 0 {
				t.Errorf("killed %s of shard %d: %+v", stage, shard, r)
			}
			id = openSpec(t, p, moveSpec)
			if n := p.Prefix(id, 0, h); n != 6 {
				t.Errorf("killed %s of shard %d: %d of 6 blocks", stage, shard, n)
			}
			wantShards(t, p, id, h)
			if at == 2 && shard == 0 && p.core.roots() != 2 {
				t.Errorf("%d chains of two came back: what hangs on a moved entry was not told where it is",
					p.core.roots())
			}
			closePool(t, p)
		}
	}
}

// roots is the number of entries that hang on none.
func (c *core) roots() (n int) {
	for e := uint32(1); e < c.high; e++ {
		if r := &c.recs.All[e]; r.is(flagLive) && r.prev == none {
			n++
		}
	}
	return n
}

// leave ends a pool as a kill does: nothing of its file is put in order.
func leave(t *testing.T, p *Pool) {
	t.Helper()
	p.core.moving = nil
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestBadPageWhileItMoves checks that an unreadable page costs the entries on it, and an unwritable
// one none that is only moved there. The others move, and neither page is used again.
func TestBadPageWhileItMoves(t *testing.T) {
	for _, from := range []bool{true, false} {
		p, id, h := openMovable(t, "")
		tenants := plan(t, p, id, h, 1)
		p.planMoves(tenants, nil)
		moving := p.core.moving
		bad := moving[len(moving)-1].at
		if from {
			bad = moving[len(moving)-1].from
		}
		spoil(t, p, bad)
		failed := 0
		for i := range moving {
			if moving[i].failed = !p.copyMove(&moving[i]); moving[i].failed {
				failed++
			}
		}
		held := p.settleMoves(nil)
		p.endEmpty(slabOf(p, tenants))
		check(t, p)
		s := p.Stats()
		if failed == 0 || s.Bad.Pages != 1 || int(s.Moved)+failed != len(tenants) {
			t.Errorf(
				"source %v: %d of %d failed, %d moved, %d bad pages", from, failed, len(tenants), s.Moved, s.Bad.Pages,
			)
		}
		if gone := failed - len(held); from && (gone == 0 || s.Dropped < uint64(gone)) || !from && gone != 0 {
			t.Errorf("source %v: of %d that failed %d are still there, %d dropped", from, failed, len(held), s.Dropped)
		}
		noSlotOn(t, p, moveSpec, bad)
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestMovesBesideReaders stores blocks of three sizes while others read, with each byte compared.
func TestMovesBesideReaders(t *testing.T) {
	p, err := Open(Options{Bytes: 512 << 10, SlabBytes: 16 << 10})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var spaces []pool.SpaceID
	for i, n := range []uint32{1000, 3000, 5000} {
		id, err := p.OpenSpace(pool.Spec{
			Fingerprint: pool.Fingerprint{byte(i + 1)}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{n}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		spaces = append(spaces, id)
	}
	var all sync.WaitGroup
	for w := range 4 {
		all.Go(func() {
			for turn := range 300 {
				id, h := spaces[turn/50%3], randomChain(nil, 1+w*1000+turn%40, 12)
				n := p.Prefix(id, 0, h)
				storeShard(p, id, h.Slice(n, h.N), 0)
				b := shardBatch(id, h, 0)
				p.Acquire(b)
				for i, s := range b.Slots {
					if b.Status[i] == pool.OK && (!bytes.Equal(p.base[s.Off:][:pool.MaxHashLen], h.At(i)) ||
						!bytes.Equal(p.base[s.Off+int64(s.Len)-8:][:8], tail(h.At(i), int(s.Len)))) {
						t.Errorf("wrong bytes in block %d of chain %d of worker %d", i, turn, w)
					}
				}
				p.Release(b.Slots, b.Status)
			}
		})
	}
	all.Wait()
	check(t, p)
	if s := p.Stats(); s.Moved == 0 || s.Reassigned == 0 {
		t.Errorf("%d slots moved, %d slabs reassigned: nothing was tried", s.Moved, s.Reassigned)
	}
}

// TestMovedWithBadHeaders moves entries whose headers, old and new, lie on an unreadable page: the
// process survives, and the entries have moved.
func TestMovedWithBadHeaders(t *testing.T) {
	for shard := range uint8(2) {
		p, id, h := openMovable(t, shmPath(t))
		tenants := plan(t, p, id, h, shard)
		p.planMoves(tenants, nil)
		copyPlanned(p)
		unmapPage(t, p.core.file.OutsideArena(), 0)
		p.settleMoves(nil)
		p.endEmpty(slabOf(p, tenants))
		wantShards(t, p, id, h)
		if s := p.Stats(); s.Moved == 0 || s.Bad.Faults == 0 {
			t.Errorf("shard %d: %d moved, %d pages of headers faulted", shard, s.Moved, s.Bad.Faults)
		}
		closePool(t, p)
	}
}

// TestMovedToABadHeader checks that the header of the old slot is cleared even if that of the new
// slot cannot be written, since the old slot is given to another entry.
func TestMovedToABadHeader(t *testing.T) {
	p := reopen(t, Options{Bytes: 256 << 10, SlabBytes: 64 << 10, Path: shmPath(t)})
	id := openSpec(t, p, keptSpec)
	perPage := arena.PageBytes / arena.HeaderBytes // as many as slots of a slab
	before, h := randomChain(nil, 1, perPage), randomChain(nil, 2, 1)
	put(t, p, id, before)
	put(t, p, id, h)
	gone := []pool.Key{{Space: keptSpec.Fingerprint, Hash: pool.MakeHash(before.At(perPage - 1))}}
	if err := newStore(t, p, keptSpec).Delete(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	tenants := plan(t, p, id, h, 0)
	p.planMoves(tenants, nil)
	copyPlanned(p)
	m := p.core.moving[0]
	old := p.core.header(m.slot)
	if old.Check.Load() == 0 {
		t.Fatal("a stored block has no header")
	}
	to := uintptr(unsafe.Pointer(p.core.header(m.to))) - uintptr(unsafe.Pointer(&p.core.file.OutsideArena()[0]))
	unmapPage(t, p.core.file.OutsideArena(), int64(to))
	p.settleMoves(nil)
	p.endEmpty(slabOf(p, tenants))
	if moved := p.Stats().Moved; moved != 1 || old.Check.Load() != 0 {
		t.Errorf("%d moved, and the header of the slot that was left still says %#x", moved, old.Check.Load())
	}
	closePool(t, p)
}

// TestBadPageIsToldWithoutLocks stores a block for which entries have to move off an unreadable
// page: the callback may use the pool, also in ways that move entries.
func TestBadPageIsToldWithoutLocks(t *testing.T) {
	var p *Pool
	told := 0
	tell := func(BadPage) {
		told++
		if !p.moves.TryLock() {
			t.Error("told of a bad page while entries move")
			return
		}
		p.moves.Unlock()
		p.Stats() // would hang with the pool's lock held
	}
	p = reopen(t, Options{Bytes: 128 << 10, SlabBytes: 32 << 10, HugePages: Off, BadPage: tell})
	small, big := keptSpec, pool.Spec{
		Fingerprint: pool.Fingerprint{2}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{32 << 10}}},
	}
	a, b := openSpec(t, p, small), openSpec(t, p, big)
	h := randomChain(nil, 1, 128)
	put(t, p, a, h)
	var keys []pool.Key
	for slab := range 4 { // room for all of a slab in the others
		for i := range 16 {
			keys = append(keys, pool.Key{Space: small.Fingerprint, Hash: pool.MakeHash(h.At(slab*32 + 16 + i))})
		}
	}
	if err := newStore(t, p, small).Delete(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	for slab := range int64(4) {
		spoil(t, p, slab*32<<10)
	}
	reserve(p, b, randomChain(nil, 2, 1))
	if told == 0 || uint64(told) != uint64(p.Stats().Bad.Pages) {
		t.Errorf("told of %d bad pages, %d were retired", told, p.Stats().Bad.Pages)
	}
	closePool(t, p)
}

// planMoves, settleMoves and endEmpty are the steps of an emptying, one by one.
func (p *Pool) planMoves(tenants, held []tenant) (left, stay []tenant, full bool) {
	p.locked(func(c *core) { left, stay, full = c.planMoves(tenants, held) })
	return left, stay, full
}

func (p *Pool) settleMoves(held []tenant) (stay []tenant) {
	p.locked(func(c *core) { stay = c.settleMoves(held) })
	return stay
}

func (p *Pool) endEmpty(n int32) (emptied bool) {
	p.locked(func(c *core) { emptied = c.slabs.EndDrain(n) })
	return emptied
}
