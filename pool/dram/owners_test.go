package dram

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/evict"
)

// owned is a pool of 256 blocks of 1 KiB with an owner that may have this many.
func owned(t testing.TB, blocks int) (*Pool, pool.Owner) { return ownedWith(t, blocks, nil) }

func ownedWith(t testing.TB, blocks int, policy advisor.Policy) (*Pool, pool.Owner) {
	p, err := Open(Options{Bytes: 256 << 10, SlabBytes: 4 << 10, Advisor: asAdvisor(policy, nil)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	openOwnedSpace(t, p)
	return p, openOwner(t, p, "one", blocks)
}

func openOwnedSpace(t testing.TB, p *Pool) {
	if _, err := p.OpenSpace(
		pool.Spec{Shards: 1, Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{1024}}}},
	); err != nil {
		t.Fatal(err)
	}
}

func openOwner(t testing.TB, p *Pool, name string, blocks int) pool.Owner {
	o, err := p.OpenOwner(name)
	if err != nil {
		t.Fatal(err)
	}
	p.SetBudget(o, int64(blocks)<<10)
	return o
}

// saveAs stores a chain for an owner, and returns the statuses of its blocks.
func saveAs(p *Pool, o pool.Owner, h pool.Hashes, parent []byte) []pool.Status {
	b := reserveAs(p, o, h, parent)
	p.Commit(b.Slots, p.Epoch(0), b.Status)
	return b.Status
}

func reserveAs(p *Pool, o pool.Owner, h pool.Hashes, parent []byte) *pool.Batch {
	b := &pool.Batch{
		Epoch: p.Epoch(0), Parent: parent, Owner: o, Hashes: h,
		Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
	p.Reserve(b)
	return b
}

func count(status []pool.Status, want pool.Status) (n int) {
	for _, s := range status {
		if s == want {
			n++
		}
	}
	return n
}

// ownerStats returns what is known of an owner.
func ownerStats(t testing.TB, p *Pool, name string) pool.OwnerStats {
	t.Helper()
	for _, o := range p.Stats().Owners.Each {
		if o.Name == name {
			return o
		}
	}
	t.Fatalf("no owner %q: %+v", name, p.Stats().Owners)
	return pool.OwnerStats{}
}

func stored(p *Pool, h pool.Hashes) int {
	present := make([]bool, h.N)
	p.Exists(0, 0, h, present)
	n := 0
	for _, there := range present {
		if there {
			n++
		}
	}
	return n
}

// TestBudgetEvictsTheOwnersOldest stores chains beyond a budget: the owner's least recently used
// goes, from its end, and nothing of others, who have older blocks.
func TestBudgetEvictsTheOwnersOldest(t *testing.T) {
	p, o := owned(t, 24)
	others := randomChain(nil, 99, 40)
	saveAs(p, 0, others, nil)
	chains := [4]pool.Hashes{}
	for i := range 3 {
		chains[i] = randomChain(nil, i, 8)
		saveAs(p, o, chains[i], nil)
	}
	p.Prefix(0, 0, chains[0])
	chains[3] = randomChain(nil, 3, 6)
	if s := saveAs(p, o, chains[3], nil); count(s, pool.OK) != 6 {
		t.Fatalf("statuses %v, want all stored", s)
	}
	if n := stored(p, chains[1].Slice(0, 2)); n != 2 || stored(p, chains[1]) != 2 {
		t.Errorf("of the oldest chain %d blocks are stored, %d of them the first two: want these alone",
			stored(p, chains[1]), n)
	}
	for i, want := range map[int]int{0: 8, 2: 8, 3: 6} {
		if n := stored(p, chains[i]); n != want {
			t.Errorf("chain %d: %d blocks are stored, want %d", i, n, want)
		}
	}
	if stored(p, others) != 40 {
		t.Error("a block of nobody was evicted for an owner's budget")
	}
	if s := ownerStats(t, p, "one"); s.Bytes != 24<<10 || s.Evicted != 6 || s.EvictedBytes != 6<<10 || s.Refused != 0 {
		t.Errorf("stats %+v", s)
	}
	if s := p.Stats(); s.Owners.Evicted != 6 || s.Evicted != 6 || s.Busy != 0 {
		t.Errorf("stats %+v", s)
	}
	check(t, p)
}

// TestBudgetRefuses holds all blocks of an owner: a save gets what there is room for, as in a full
// pool, but no lease is revoked for it.
func TestBudgetRefuses(t *testing.T) {
	p, o := owned(t, 8)
	p.SetPressure(func(int64) bool { t.Error("leases are revoked for an owner's budget"); return false })
	h := randomChain(nil, 1, 6)
	saveAs(p, o, h, nil)
	_, refs, _ := p.Pin(0, 0, h, 1<<20, nil)
	s := saveAs(p, o, randomChain(nil, 2, 5), nil)
	if !slices.Equal(s, []pool.Status{pool.OK, pool.OK, pool.Busy, pool.Busy, pool.Busy}) {
		t.Errorf("statuses %v, want two stored", s)
	}
	if s := ownerStats(t, p, "one"); s.Bytes != 8<<10 || s.Refused != 3 {
		t.Errorf("stats %+v", s)
	}
	if s := p.Stats(); s.Busy != 0 || s.Owners.Refused != 3 {
		t.Errorf("stats %+v", s)
	}
	p.Unpin(refs)
	if s := saveAs(p, o, randomChain(nil, 3, 5), nil); count(s, pool.OK) != 5 {
		t.Errorf("statuses %v after the pins have ended, want all stored", s)
	}
	check(t, p)
}

// TestBudgetBelowABlock stores a block whose bytes a budget has room for, but not the slot: it is
// refused, and costs none of the owner's others.
func TestBudgetBelowABlock(t *testing.T) {
	p, o := owned(t, 4)
	wide, err := p.OpenSpace(pool.Spec{
		Fingerprint: pool.Fingerprint{1}, Shards: 1,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{3073}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	p.SetBudget(o, 3100)
	h := randomChain(nil, 1, 3)
	saveAs(p, o, h, nil)
	b := pool.Batch{
		Space: wide, Epoch: p.Epoch(wide), Owner: o, Hashes: randomChain(nil, 2, 1),
		Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1),
	}
	p.Reserve(&b)
	if b.Status[0] != pool.Busy || stored(p, h) != 3 {
		t.Errorf("status %d, and %d of 3 smaller blocks are left", b.Status[0], stored(p, h))
	}
	if s := ownerStats(t, p, "one"); s.Evicted != 0 || s.Refused != 1 {
		t.Errorf("stats %+v", s)
	}
	check(t, p)
}

// TestBudgetLeavesWhatOthersFollow continues an owner's chains for somebody else: the owner's
// blocks stay, and its saves are refused.
func TestBudgetLeavesWhatOthersFollow(t *testing.T) {
	p, o := owned(t, 4)
	other := openOwner(t, p, "two", 0)
	h := randomChain(nil, 1, 8)
	saveAs(p, o, h.Slice(0, 4), nil)
	if s := saveAs(p, other, h, nil); count(s, pool.Exists) != 4 || count(s, pool.OK) != 4 {
		t.Fatalf("statuses %v", s)
	}
	if a, b := ownerStats(t, p, "one"), ownerStats(t, p, "two"); a.Bytes != 4<<10 || b.Bytes != 4<<10 {
		t.Errorf("%+v and %+v: a block belongs to whom it was stored for first", a, b)
	}
	if s := saveAs(p, o, randomChain(nil, 2, 2), nil); count(s, pool.Busy) != 2 {
		t.Errorf("statuses %v: the owner's blocks are in the way of nobody's eviction", s)
	}
	if stored(p, h) != 8 {
		t.Error("blocks of another owner, or those before them, were evicted")
	}
	check(t, p)
}

// TestBudgetLowered lowers a budget below what the owner has: its next saves give it back.
func TestBudgetLowered(t *testing.T) {
	p, o := owned(t, 200)
	for i := range 25 {
		saveAs(p, o, randomChain(nil, i, 8), nil)
	}
	p.SetBudget(o, 10<<10)
	saveAs(p, o, randomChain(nil, 100, 1), nil)
	if s := ownerStats(t, p, "one"); s.Bytes != 10<<10 {
		t.Errorf("%d bytes, the budget is %d", s.Bytes, s.Budget)
	}
	check(t, p)
}

// TestBudgetEvictsOfALongChain stores a prompt of as many blocks as a budget has, at once and in
// steps of a prefill: what is saved next is not refused while it is put in order.
func TestBudgetEvictsOfALongChain(t *testing.T) {
	const blocks = 8192
	for _, part := range []int{256, 1024, blocks} {
		p, err := Open(Options{Bytes: (blocks + 256) << 10, SlabBytes: 4 << 10})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		openOwnedSpace(t, p)
		o := openOwner(t, p, "one", blocks)
		h := randomChain(nil, 1, blocks)
		for from := 0; from < blocks; from += part {
			var parent []byte
			if from > 0 {
				parent = h.At(from - 1)
			}
			saveAs(p, o, h.Slice(from, from+part), parent)
		}
		if s := saveAs(p, o, randomChain(nil, 2, 16), nil); count(s, pool.OK) != 16 {
			t.Errorf("stored in parts of %d: statuses %v, want all stored", part, s)
		}
		if n := stored(p, h.Slice(0, blocks-16)); n != blocks-16 {
			t.Errorf("stored in parts of %d: %d blocks of the prefix are left, want %d", part, n, blocks-16)
		}
		check(t, p)
	}
}

// TestReadForATierKeepsTheOwnersOrder reads an owner's oldest block without a use.
func TestReadForATierKeepsTheOwnersOrder(t *testing.T) {
	p, o := owned(t, 4)
	var chains []pool.Hashes
	for i := range 4 {
		chains = append(chains, randomChain(nil, i, 1))
		saveAs(p, o, chains[i], nil)
	}
	b := pool.Batch{Hashes: chains[0], Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1)}
	p.Acquire(&b)
	p.Release(b.Slots, b.Status)
	saveAs(p, o, randomChain(nil, 9, 1), nil)
	if stored(p, chains[0]) != 0 || stored(p, chains[1]) != 1 {
		t.Error("reading a block for a tier made it the owner's most recent")
	}
	check(t, p)
}

// TestOwnersOutliveTheirUsers closes owners: they are found again by name, until so many others
// came that the smallest closed one loses its entries, at once.
func TestOwnersOutliveTheirUsers(t *testing.T) {
	p, o := owned(t, 8)
	h := randomChain(nil, 1, 8)
	saveAs(p, o, h, nil)
	p.CloseOwner(o)
	if again := openOwner(t, p, "one", 8); again != o || ownerStats(t, p, "one").Bytes != 8<<10 {
		t.Errorf("owner %d after it was opened again, was %d: %+v", again, o, p.Stats().Owners)
	}
	p.CloseOwner(o)
	for i := range pool.MaxOwners {
		openOwner(t, p, fmt.Sprint("other ", i), 1)
	}
	if _, err := p.OpenOwner("one too many"); err == nil {
		t.Error("more owners are open than allowed")
	}
	if _, err := p.OpenOwner(""); err == nil {
		t.Error("an owner without a name")
	}
	p.CloseOwner(7)
	again := openOwner(t, p, "one", 8)
	if s := ownerStats(t, p, "one"); s.Bytes != 0 || stored(p, h) != 8 {
		t.Errorf("%+v: the entries of an owner whose place was given away belong to nobody", s)
	}
	saveAs(p, again, randomChain(nil, 2, 8), nil)
	p.Prefix(0, 0, h) // entries of an earlier term are used, dropped and freed
	if _, err := p.ResetSpace(0); err != nil {
		t.Fatal(err)
	}
	p.Sweep()
	if s := ownerStats(t, p, "one"); s.Bytes != 0 {
		t.Errorf("%+v after a reset", s)
	}
	check(t, p)
}

// TestRestoredEntriesBelongToNobody opens a pool's file again.
func TestRestoredEntriesBelongToNobody(t *testing.T) {
	o := Options{Bytes: 256 << 10, SlabBytes: 4 << 10, Path: shmPath(t)}
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	openOwnedSpace(t, p)
	h := randomChain(nil, 1, 8)
	saveAs(p, openOwner(t, p, "one", 8), h, nil)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if p, err = Open(o); err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	openOwnedSpace(t, p)
	one := openOwner(t, p, "one", 8)
	if s := ownerStats(t, p, "one"); s.Bytes != 0 || stored(p, h) != 8 {
		t.Errorf("%+v, %d blocks stored, want 0 bytes and 8 blocks", s, stored(p, h))
	}
	saveAs(p, one, randomChain(nil, 2, 20), nil)
	if s := ownerStats(t, p, "one"); s.Bytes != 8<<10 || stored(p, h) != 8 {
		t.Errorf("%+v, %d blocks of before stored", s, stored(p, h))
	}
	check(t, p)
}

// TestBudgetsHoldAtRandom does everything that a pool offers at random, for owners with budgets and
// without: none ever has more than its budget, and the sums are exact at all times.
func TestBudgetsHoldAtRandom(t *testing.T) {
	t.Run("least recently used", func(t *testing.T) { holdAtRandom(t, nil) })
	t.Run("hazard", func(t *testing.T) { holdAtRandom(t, evict.NewHazard()) })
}

func holdAtRandom(t *testing.T, policy advisor.Policy) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	p, one := ownedWith(t, 30, policy)
	owners := []pool.Owner{0, one, openOwner(t, p, "two", 7), openOwner(t, p, "three", 0)}
	budgets := map[string]int64{"one": 30 << 10, "two": 7 << 10}
	var open []*pool.Batch
	var pins [][]pool.Ref
	for i := range 1500 {
		h := randomChain(nil, r.IntN(30), 1+r.IntN(24))
		from := r.IntN(h.N)
		switch n := r.IntN(100); {
		case n < 45:
			var parent []byte
			if from > 0 {
				parent = h.At(from - 1)
			}
			open = append(open, reserveAs(p, owners[r.IntN(len(owners))], h.Slice(from, h.N), parent))
		case n < 75 && len(open) > 0:
			b := open[0]
			open = open[1:]
			for i := range b.Status {
				if b.Status[i] == pool.OK && r.IntN(8) == 0 {
					b.Status[i] = pool.Busy // the copy failed
				}
			}
			p.Commit(b.Slots, b.Epoch, b.Status)
		case n < 85:
			p.Prefix(0, 0, h)
		case n < 90:
			_, refs, _ := p.Pin(0, 0, h, 1<<20, nil)
			pins = append(pins, refs)
		case n < 95 && len(pins) > 0:
			p.Unpin(pins[0])
			pins = pins[1:]
		case n < 98:
			b := pool.Batch{Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
			p.Acquire(&b)
			for i := range b.Status {
				if b.Status[i] == pool.OK && r.IntN(8) == 0 {
					b.Status[i] = pool.Corrupt
				}
			}
			p.Release(b.Slots, b.Status)
		case n == 99 && r.IntN(8) == 0:
			if _, err := p.ResetSpace(0); err != nil {
				t.Fatal(err)
			}
			p.Sweep()
		}
		check(t, p)
		for name, budget := range budgets {
			if s := ownerStats(t, p, name); s.Bytes > budget {
				t.Fatalf("step %d: %q has %d bytes, its budget is %d", i, name, s.Bytes, budget)
			}
		}
	}
	if s := p.Stats().Owners; s.Evicted == 0 || s.Refused == 0 {
		t.Errorf("%+v: nothing was evicted or refused for a budget, so nothing was shown", s)
	}
}

// TestBudgetHoldsUnderConcurrentSaves saves for one owner from many goroutines, beside others, who
// keep what they have.
func TestBudgetHoldsUnderConcurrentSaves(t *testing.T) {
	p, one := owned(t, 40)
	two := openOwner(t, p, "two", 0)
	kept := randomChain(nil, 1000, 64)
	saveAs(p, two, kept, nil)
	var done sync.WaitGroup
	for g := range 4 {
		done.Go(func() {
			for i := range 200 {
				h := randomChain(nil, g*200+i, 6)
				b := reserveAs(p, one, h, nil)
				if bytes := ownerStats(t, p, "one").Bytes; bytes > 40<<10 {
					t.Errorf("%d bytes, the budget is %d", bytes, 40<<10)
				}
				p.Commit(b.Slots, 1, b.Status)
				p.Prefix(0, 0, h)
			}
		})
	}
	done.Wait()
	if s := ownerStats(t, p, "one"); s.Bytes != 40<<10 {
		t.Errorf("%d bytes after all saves, want the budget's %d", s.Bytes, 40<<10)
	}
	if n := stored(p, kept); n != kept.N {
		t.Errorf("%d of %d blocks of the other owner are stored", n, kept.N)
	}
	check(t, p)
}
