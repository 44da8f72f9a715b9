package dram

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// spoil takes the page at an offset of the arena away from this process. Before that the arena is
// populated to its end: populating would find the page too, and retire it at a time of its own.
func spoil(t *testing.T, p *Pool, off int64) {
	t.Helper()
	if err := p.Populated(); err != nil {
		t.Fatal(err)
	}
	unmapPage(t, p.base, off)
}

// unmapPage unmaps a page in this process alone: an access is a real SIGBUS.
func unmapPage(t *testing.T, mem []byte, off int64) {
	t.Helper()
	fd, err := unix.MemfdCreate("nothing", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	at := unsafe.Pointer(&mem[off/arena.PageBytes*arena.PageBytes])
	const prot, how = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_FIXED
	if _, err := unix.MmapPtr(fd, 0, at, arena.PageBytes, prot, how); err != nil {
		t.Fatal(err)
	}
}

// punch takes a page away from a file on a file system that has no other one to give: for every
// process, until what it put there, rest, is removed.
func punch(t *testing.T, path string, off int64) (rest string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const punchHole = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	if err := unix.Fallocate(int(f.Fd()), punchHole, off/arena.PageBytes*arena.PageBytes, arena.PageBytes); err != nil {
		t.Fatal(err)
	}
	rest = filepath.Join(filepath.Dir(path), fmt.Sprintf("rest-%d", off))
	fillUp(t, rest)
	return rest
}

// slotOf is where shard 0 of a block lies.
func slotOf(t *testing.T, p *Pool, id pool.SpaceID, h pool.Hashes, i int) pool.Slot {
	t.Helper()
	b := pool.Batch{Space: id, Hashes: h.Slice(i, i+1), Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1)}
	p.Acquire(&b)
	if b.Status[0] != pool.OK {
		t.Fatalf("block %d: status %d", i, b.Status[0])
	}
	s := b.Slots[0]
	p.Release(b.Slots, b.Status)
	return s
}

func keysOf(h pool.Hashes) (keys []pool.Key) {
	for i := range h.N {
		keys = append(keys, pool.Key{Space: keptSpec.Fingerprint, Hash: pool.MakeHash(h.At(i))})
	}
	return keys
}

func items(h pool.Hashes, fill byte) (out []pool.Item) {
	for _, k := range keysOf(h) {
		data := make([]byte, keptSpec.Groups[0].ShardBytes[0])
		for i := range data {
			data[i] = fill
		}
		out = append(out, pool.Item{Key: k, Data: data})
	}
	return out
}

// overlaps reports whether a slot lies on the page of an offset.
func overlaps(s pool.Slot, off int64) bool {
	page := off / arena.PageBytes * arena.PageBytes
	return s.Off < page+arena.PageBytes && page < s.Off+int64(s.Len)
}

// noSlotOn reserves all that a pool has, and wants no slot on the page of an offset.
func noSlotOn(t *testing.T, p *Pool, spec pool.Spec, off int64) (slots int) {
	t.Helper()
	id := openSpec(t, p, spec)
	h := randomChain(nil, 99, int(p.info.Bytes/arena.SlotUnit))
	for i := range h.N { // one by one: each entry is a chain of its own, and goes when it must
		b := pool.Batch{
			Space: id, Epoch: p.Epoch(id), Hashes: h.Slice(i, i+1), Status: make([]pool.Status, 1),
			Slots: make([]pool.Slot, 1),
		}
		p.Reserve(&b)
		if b.Status[0] != pool.OK {
			continue
		}
		slots++
		if overlaps(b.Slots[0], off) {
			page := off / arena.PageBytes * arena.PageBytes
			t.Fatalf(
				"slot of %d bytes at %d was given out, the page at %d is bad", b.Slots[0].Len, b.Slots[0].Off, page,
			)
		}
		p.Commit(b.Slots, b.Epoch, b.Status)
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	return slots
}

// TestBadPage checks that an unreadable page costs the blocks on it. They are stored elsewhere, no
// slot of any size overlaps the page again, and everything else is there.
func TestBadPage(t *testing.T) {
	var told []BadPage
	tell := func(b BadPage) { told = append(told, b) }
	p := reopen(t, Options{Bytes: 1 << 20, SlabBytes: 16 << 10, HugePages: Off, BadPage: tell})
	defer closePool(t, p)
	id, store := openSpec(t, p, keptSpec), newStore(t, p, keptSpec)
	h := randomChain(nil, 1, 40)
	if err := store.Put(t.Context(), items(h, 7)); err != nil {
		t.Fatal(err)
	}
	bad := slotOf(t, p, id, h, 17)
	spoil(t, p, bad.Off)
	got := items(h, 0)
	if err := store.Get(t.Context(), got); err != nil {
		t.Fatal(err)
	}
	lost := 0
	for i := range got {
		switch got[i].Status {
		case pool.OK:
			if got[i].Data[100] != 7 {
				t.Fatalf("block %d has wrong bytes", i)
			}
		case pool.Corrupt, pool.Missing: // the first in the page is told so, the others went with it
			lost++
		default:
			t.Errorf("block %d: status %d", i, got[i].Status)
		}
	}
	if want := int(arena.PageBytes / keptSpec.Groups[0].ShardBytes[0]); lost != want {
		t.Errorf("%d blocks are gone, %d were in the page", lost, want)
	}
	s := p.Stats()
	if s.Bad.Pages != 1 || s.Bad.Bytes != 16<<10 ||
		s.Bad.Dropped != uint64(lost) || !s.Bad.Healthy() || s.Pinned != 0 {
		t.Errorf("%+v of %+v", s.Bad, s)
	}
	if len(told) != 1 || told[0].Off != bad.Off/arena.PageBytes*arena.PageBytes || told[0].Dropped != lost {
		t.Errorf("told of %+v", told)
	}
	if err := store.Put(t.Context(), items(h, 7)); err != nil {
		t.Fatal(err)
	}
	if n := p.Prefix(id, 0, h); n != h.N {
		t.Errorf("%d of %d blocks after they were stored again", n, h.N)
	}
	if n := noSlotOn(t, p, keptSpec, bad.Off); n < 1<<10-16 {
		t.Errorf("%d slots were given out", n)
	}
	for _, bytes := range []uint32{16 << 10, 3 << 10, 5000} { // other slabs have other slots
		other := pool.Spec{
			Fingerprint: pool.Fingerprint{byte(bytes >> 8)}, Identity: []byte("other"), Shards: 1,
			Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{bytes}}},
		}
		if n := noSlotOn(t, p, other, bad.Off); n == 0 {
			t.Errorf("no slot of %d bytes was given out", bytes)
		}
	}
}

// TestBadPageOfASlotInUse checks that a slot that is written when its page goes bad is not free
// afterwards.
func TestBadPageOfASlotInUse(t *testing.T) {
	p := reopen(t, Options{Bytes: 64 << 10, SlabBytes: 16 << 10, HugePages: Off})
	defer closePool(t, p)
	id := openSpec(t, p, keptSpec)
	h := randomChain(nil, 1, 8)
	b := pool.Batch{Space: id, Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
	p.Reserve(&b)
	bad := b.Slots[5]
	spoil(t, p, bad.Off)
	for i, s := range b.Slots {
		if p.Probe(s) == overlaps(s, bad.Off) {
			t.Errorf("slot %d at %d, the page at %d is bad", i, s.Off, bad.Off)
		}
	}
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
	p.Commit(b.Slots, 1, b.Status)
	for i, status := range b.Status {
		if want := map[bool]pool.Status{true: pool.Stale, false: pool.OK}[i/4 == 5/4]; status != want {
			t.Errorf("slot %d: status %d, want %d", i, status, want)
		}
	}
	noSlotOn(t, p, keptSpec, bad.Off)
	if s := p.Stats(); s.Bad.Healthy() || s.Bad.Pages != 1 { // a quarter of it
		t.Errorf("%+v", s.Bad)
	}
}

// TestBadPageAtTheStart checks that a page found bad at the start costs its blocks, and not the
// start.
func TestBadPageAtTheStart(t *testing.T) {
	o, h := keptOn(t, mounted(t, "tmpfs", "size=16m"))
	p := reopen(t, o)
	bad := slotOf(t, p, openSpec(t, p, keptSpec), h, 17)
	closePool(t, p)
	punch(t, o.Path, bad.Off)
	p = reopen(t, o)
	defer closePool(t, p)
	if err := p.Populated(); err != nil {
		t.Error(err)
	}
	id := openSpec(t, p, keptSpec)
	present := make([]bool, h.N)
	p.Exists(id, 0, h, present)
	for i, is := range present {
		if is == (i/4 == 17/4) {
			t.Errorf("block %d: %v", i, is)
		}
	}
	if s := p.Stats(); s.Bad.Pages != 1 {
		t.Errorf("%+v", s.Bad)
	}
}

// keptOn is a file at a path that holds a chain of 200 blocks: more than a page of headers.
func keptOn(t *testing.T, path string) (Options, pool.Hashes) {
	t.Helper()
	o := Options{Bytes: 256 << 10, SlabBytes: 16 << 10, Path: path}
	h := randomChain(nil, 1, 200)
	p := reopen(t, o)
	put(t, p, openSpec(t, p, keptSpec), h)
	closePool(t, p)
	return o, h
}

// TestBadPageOfHeaders checks that an unreadable page of headers costs their blocks, and not the
// start; nor, when it goes bad later, the process.
func TestBadPageOfHeaders(t *testing.T) {
	o, h := keptOn(t, mounted(t, "tmpfs", "size=16m"))
	l := arena.LayoutOf(o.Bytes, o.SlabBytes, arena.PageBytes)
	punch(t, o.Path, l.Headers+arena.PageBytes)
	p := reopen(t, o)
	r := p.Info().Recovery
	if r.Cold != "" || r.Lost != 64 || r.Entries != 200-64 {
		t.Errorf("recovery %+v", r)
	}
	id := openSpec(t, p, keptSpec)
	put(t, p, id, h) // into slots without headers, too
	if n := p.Prefix(id, 0, h); n != h.N {
		t.Errorf("%d of %d blocks after they were stored again", n, h.N)
	}
	p.Unpin(pinAll(t, p, id, h))
	if s := p.Stats(); s.Bad.Pages != 0 || s.Bad.Faults == 0 {
		t.Errorf("%+v", s.Bad)
	}
	for _, off := range []int64{l.Headers, l.Spaces, l.Slabs, l.Super} { // in flight
		unmapPage(t, unsafe.Slice((*byte)(unsafe.Pointer(p.core.file.Header(0))), l.End-l.Headers), off-l.Headers)
	}
	if _, err := p.ResetSpace(id); err != nil {
		t.Error(err)
	}
	p.Sweep()
	put(t, p, id, h)
	late := pool.Spec{Fingerprint: pool.Fingerprint{2}, Identity: []byte("late"), Shards: 1, Groups: keptSpec.Groups}
	openSpec(t, p, late)
	if n := p.Prefix(id, 0, h); n != h.N {
		t.Errorf("%d of %d blocks in a pool without headers", n, h.N)
	}
	closePool(t, p)
}

func pinAll(t *testing.T, p *Pool, id pool.SpaceID, h pool.Hashes) []pool.Ref {
	t.Helper()
	n, refs, _ := p.Pin(id, 0, h, 1<<40, nil)
	if n != h.N {
		t.Errorf("%d of %d blocks pinned", n, h.N)
	}
	return refs
}

// TestBadPagesOfTheIndex checks the start with an unreadable page in each other area of the file.
func TestBadPagesOfTheIndex(t *testing.T) {
	for name, c := range map[string]struct {
		at   func(l *arena.Layout) int64
		back int
		cold bool
	}{
		"spaces":          {func(l *arena.Layout) int64 { return l.Spaces }, 0, false},
		"superblock":      {func(l *arena.Layout) int64 { return l.Super }, 0, true},
		"heads of chains": {func(l *arena.Layout) int64 { return l.Headers }, 136, false},
		"learned":         {func(l *arena.Layout) int64 { return l.Learned }, 200, false},
	} {
		t.Run(name, func(t *testing.T) {
			o, h := keptOn(t, mounted(t, "tmpfs", "size=16m"))
			l := arena.LayoutOf(o.Bytes, o.SlabBytes, arena.PageBytes)
			rest := punch(t, o.Path, c.at(&l))
			for process := range 2 {
				p := reopen(t, o)
				r := p.Info().Recovery
				if process == 0 && ((r.Cold != "") != c.cold || r.Entries != c.back) {
					t.Errorf("recovery %+v", r)
				}
				if c.cold && process == 0 { // a file that is made anew has that page as well
					if err := os.Remove(rest); err != nil {
						t.Fatal(err)
					}
				}
				put(t, p, openSpec(t, p, keptSpec), h)
				if n := p.Prefix(0, 0, h); n != h.N {
					t.Errorf("%d of %d blocks", n, h.N)
				}
				closePool(t, p)
			}
		})
	}
}

// badPart is the share of its bytes that a healthy pool may lack.
const badPart = 8

// TestManyBadPages checks that a page of a retired slab costs what is still there, and that the
// pool reports that it is not healthy.
func TestManyBadPages(t *testing.T) {
	o := Options{Bytes: 32 << 20, SlabBytes: 256 << 10, Path: shmPath(t)}
	p := reopen(t, o)
	id := openSpec(t, p, keptSpec)
	put(t, p, id, randomChain(nil, 1, 20000))
	for n := range int64(2 * arena.MaxBadPages) {
		if bad := p.Stats().Bad; bad.Healthy() != (bad.Pages < arena.MaxBadPages && bad.Bytes < o.Bytes/badPart) {
			t.Errorf("%d pages: %+v", n, bad)
		}
		p.retire(n * 2 * arena.PageBytes)
	}
	const late = arena.PageBytes // in a slab that is retired, and still holds its blocks
	before := p.Stats().Entries
	p.retire(late)
	if n := before - p.Stats().Entries; n != arena.PageBytes/arena.SlotUnit {
		t.Errorf("%d blocks went with a page of a retired slab", n)
	}
	s := p.Stats()
	if s.Bad.Bytes != 16*o.SlabBytes || s.Bad.Healthy() {
		t.Errorf("%+v", s.Bad)
	}
	closePool(t, p)
	closePool(t, reopen(t, o))
}

// TestRetiringInAStorm retires pages at random while blocks of all sizes are stored, read, held,
// reset and evicted.
func TestRetiringInAStorm(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 6 {
		o := Options{Bytes: 1 << 20, SlabBytes: 16 << 10, HugePages: Off}
		if rng.IntN(2) == 0 {
			o.Path = shmPath(t)
		}
		r := retiring{t: t, p: reopen(t, o), rng: rng, bad: map[int64]bool{}}
		for range 150 {
			r.step()
		}
		r.end()
		closePool(t, r.p)
		if o.Path != "" {
			closePool(t, reopen(t, o))
		}
	}
}

// retiring is one pool in a storm.
type retiring struct {
	t    *testing.T
	p    *Pool
	rng  *rand.Rand
	bad  map[int64]bool
	held []pool.Batch // reserved or acquired
	load []bool       // of held: acquired
}

func (r *retiring) step() {
	specs := stormSpecs()
	id := openSpec(r.t, r.p, specs[r.rng.IntN(len(specs))])
	spec := r.p.core.spaces[id].spec
	switch r.rng.IntN(10) {
	case 0:
		page := r.rng.Int64N(r.p.info.Bytes / arena.PageBytes)
		r.bad[page] = true
		r.p.retire(page*arena.PageBytes + r.rng.Int64N(arena.PageBytes))
	case 1:
		if _, err := r.p.ResetSpace(id); err != nil {
			r.t.Fatal(err)
		}
		r.p.Sweep()
	case 2, 3:
		r.end()
	default:
		h := randomChain(nil, r.rng.IntN(8), 1+r.rng.IntN(60))
		for shard := range spec.Shards {
			b := pool.Batch{
				Space: id, Shard: uint8(shard), Epoch: r.p.Epoch(id), Hashes: h,
				Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
			}
			load := r.rng.IntN(3) == 0
			if load {
				r.p.Acquire(&b)
			} else {
				r.p.Reserve(&b)
				r.look(&b)
			}
			r.held, r.load = append(r.held, b), append(r.load, load)
		}
	}
	if err := r.p.Check(); err != nil {
		r.t.Fatal(err)
	}
}

// look wants no bad page under a slot that was given out.
func (r *retiring) look(b *pool.Batch) {
	for i, s := range b.Slots {
		for at := s.Off / arena.PageBytes; b.Status[i] == pool.OK && at*arena.PageBytes < s.Off+int64(s.Len); at++ {
			if r.bad[at] {
				r.t.Fatalf("slot at %d, %d bytes: page %d is bad", s.Off, s.Len, at)
			}
		}
	}
}

// end ends all reservations and pins.
func (r *retiring) end() {
	for i := range r.held {
		b := &r.held[i]
		if r.load[i] {
			r.p.Release(b.Slots, b.Status)
		} else {
			r.p.Commit(b.Slots, b.Epoch, b.Status)
		}
	}
	r.held, r.load = nil, nil
}

// retire retires the page at an offset of the arena, and reports it if it is newly retired.
func (p *Pool) retire(off int64) {
	var page BadPage
	fresh := false
	if p.locked(func(c *core) { page, fresh = c.retire(off) }); fresh && p.onBadPage != nil {
		p.onBadPage(page)
	}
}
