package evict

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/kvagent/kvagent/pool"
)

// TestStateIsSmall holds 64 bytes per entry and 16 per block that is remembered.
func TestStateIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(node{}) + unsafe.Sizeof(run{}); n > 64 {
		t.Errorf("%d bytes per entry that is a run of its own, at most 64", n)
	}
	if n := unsafe.Sizeof(ghost{}); n > 16 {
		t.Errorf("%d bytes per ghost, at most 16", n)
	}
}

// spread is a print for tests.
func spread(n int) uint64 {
	x := uint64(n+1) * 0x9e3779b97f4a7c15
	x = (x ^ x>>29) * 0xbf58476d1ce4e5b9
	return x ^ x>>32
}

// TestRiskIsCountedOnEntering stores blocks of which a tenth is used again at one age. Those that
// never come again are at risk there as well: counted only at reuse, the hazard would be one.
func TestRiskIsCountedOnEntering(t *testing.T) {
	h := NewHazard()
	const n, again = 4000, 100e9 // ns
	for i := range n {
		now := int64(i) * 1e8
		h.Access(&pool.Use{Now: now, BlockTokens: 512, Prints: []uint64{spread(i)}})
		h.Insert(
			&pool.Insertion{Now: now, BlockTokens: 512, Entries: []uint32{uint32(i + 1)}, Prints: []uint64{spread(i)}},
		)
		if back := i - again/1e8; back >= 0 && back%10 == 0 {
			h.Access(&pool.Use{
				Now: now, BlockTokens: 512, Prints: []uint64{spread(back)}, Entries: []uint32{uint32(back + 1)},
			})
		}
	}
	b := binOf(uint32(again / 1e6))
	h.tables.settleAll()
	t.Logf("bin %d: used %v, at risk %v", b, h.tables.used[0][b], h.tables.risk[0][b])
	for c := range numClasses {
		used, risk := h.tables.used[c][b], h.tables.risk[c][b]
		if used < 100 {
			continue
		}
		if hazard := used / risk; hazard < 0.08 || hazard > 0.13 {
			t.Errorf("risk counted only at reuse: class %d: of %.0f blocks that reached the age %.0f were used, a "+
				"share of %.2f; a tenth was",
				c, risk, used, hazard)
		}
		return
	}
	t.Fatal("no class saw the uses")
}

// TestSameRequestTwice looks a chain up like a scheduler: again and again until the request runs.
func TestSameRequestTwice(t *testing.T) {
	h := NewHazard()
	u := pool.Use{BlockTokens: 512, Prints: []uint64{spread(1), spread(2), spread(3)}}
	h.Access(&u)
	h.Insert(&pool.Insertion{BlockTokens: 512, Entries: []uint32{1, 2}, Prints: u.Prints[:2]})
	u.Now, u.Entries = 100e9, []uint32{1, 2}
	for range 5 {
		h.Access(&u)
		u.Now += 1e9
	}
	if got := h.runs.at(h.nodes.at(1).run).class / (2 * distances * gaps); got != 1 {
		t.Errorf("%d uses after one request that asked five times", got)
	}
}

// TestStaleUseIsPassedOver reports a use of an entry whose number now belongs to another block.
func TestStaleUseIsPassedOver(t *testing.T) {
	h := NewHazard()
	h.Insert(&pool.Insertion{BlockTokens: 512, Entries: []uint32{1}, Prints: []uint64{spread(1)}})
	h.Remove([]uint32{1})
	h.Insert(&pool.Insertion{Now: 1e9, BlockTokens: 512, Entries: []uint32{1}, Prints: []uint64{spread(2)}})
	h.Access(&pool.Use{Now: 20e9, BlockTokens: 512, Entries: []uint32{1}, Prints: []uint64{spread(1)}})
	if got := h.runs.at(h.nodes.at(1).run).used; got > 1001 {
		t.Errorf("the block was used at %d ms, and it was not", got)
	}
}

// TestPassagesAreCountedInEachBin compares the counts of blocks that pass from bin to bin with
// those of a loop over the bins.
func TestPassagesAreCountedInEachBin(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	got, want := tables{weight: 3}, tables{weight: 3}
	for range 2000 {
		c, from, n := uint16(r.IntN(numClasses)), r.IntN(numBins+1)-1, 1+r.IntN(9)
		to := max(0, from) + r.IntN(numBins-max(0, from))
		got.enter(c, from, to, int32(n))
		for b := from + 1; b <= to; b++ {
			want.risk[c][b] += float32(float64(n) * want.weight)
		}
		if r.IntN(2) == 0 {
			got.use(c, to)
			want.used[c][to] += float32(want.weight)
		}
		if r.IntN(100) == 0 {
			got.settle(int(c))
		}
	}
	got.settleAll()
	if got.risk != want.risk || got.used != want.used {
		t.Error("counts differ")
	}
}

// no entry is held or has children.
type noneHeld struct{}

func (noneHeld) Child(uint32) uint32 { return 0 }
func (noneHeld) Held(uint32) bool    { return false }

// TestGhostsGrowWithoutLoss adds ghosts while the table grows set by set.
func TestGhostsGrowWithoutLoss(t *testing.T) {
	var g ghosts
	g.grow(0, 0)
	const n = 60_000
	for i := range n {
		g.grow(i*8, 2)
		g.put(ghostOf(spread(i), state{used: uint32(i), class: uint16(i % numClasses), bin: uint8(i % numBins)}))
	}
	lost := 0
	for i := range n {
		x := g.find(spread(i))
		if x == nil {
			lost++
			continue
		}
		want := state{used: uint32(i), class: uint16(i % numClasses), bin: uint8(i % numBins)}
		if got := x.state(); got != want {
			t.Fatalf("ghost %d came back as %+v, want %+v", i, got, want)
		}
	}
	if lost > n/100 || g.count != n-lost {
		t.Errorf("%d of %d ghosts lost in a table with room for 8 times as many, %d are counted", lost, n, g.count)
	}
}

// stored is a policy with n chains of one block each, entry i of block i, looked up a second apart.
func stored(n int) *Hazard {
	h := NewHazard()
	for i := 1; i <= n; i++ {
		now := int64(i) * 1e9
		h.Access(&pool.Use{Now: now, BlockTokens: 512, Prints: []uint64{spread(i)}})
		h.Insert(&pool.Insertion{Now: now, BlockTokens: 512, Entries: []uint32{uint32(i)}, Prints: []uint64{spread(i)}})
	}
	return h
}

// TestPrioritiesOrderVictims wishes one of the entries away and another to stay, of which a policy
// without experience believes everything.
func TestPrioritiesOrderVictims(t *testing.T) {
	h := stored(20)
	const now, until = 21e9, 200e9
	wish := func(e uint32, priority uint8, until int64) {
		a := pool.Advice{Now: now, Prints: []uint64{spread(int(e))}, Entries: []uint32{e}}
		a.Priority, a.Until = priority, until
		h.Advise(&a)
	}
	wish(20, 0, until)
	wish(1, 100, until)
	wish(2, neutral, until)
	wish(3, 0, 0) // no wish
	var order []uint32
	for range 20 {
		e := h.Victim(now, 1, 0, noneHeld{})
		order = append(order, e)
		h.Remove([]uint32{e})
	}
	if order[0] != 20 || order[1] != 2 || order[2] != 3 || order[19] != 1 {
		t.Errorf("evicted %v: want 20, which is not wanted, first, then by use, and 1 last", order)
	}
}

// TestAdviceOfBlocksNotStored advises on a block that is looked up and not stored yet.
func TestAdviceOfBlocksNotStored(t *testing.T) {
	h := stored(3)
	h.Access(&pool.Use{Now: 4e9, BlockTokens: 512, Prints: []uint64{spread(4)}})
	h.Advise(&pool.Advice{Now: 5e9, Prints: []uint64{spread(4)}, Entries: []uint32{0}, Finish: pool.FinishTool})
	h.Insert(&pool.Insertion{Now: 5e9, BlockTokens: 512, Entries: []uint32{4}, Prints: []uint64{spread(4)}})
	if got := h.Class(4); got != "end=tool,uses=0,tail=0.5k" {
		t.Errorf("class %q after a tool call", got)
	}
	h.Access(&pool.Use{Now: 20e9, BlockTokens: 512, Prints: []uint64{spread(4)}, Entries: []uint32{4}})
	if got := h.Class(4); got != "uses=1,tail=0.5k,new=short" {
		t.Errorf("class %q after another use", got)
	}
}

// TestWorthLessThanAllIsRefused has blocks that come back, and one that was never seen before.
func TestWorthLessThanAllIsRefused(t *testing.T) {
	h := stored(20)
	now := int64(30e9)
	look := func(block int, entries ...uint32) {
		now += 1e9
		h.Access(&pool.Use{Now: now, BlockTokens: 512, Prints: []uint64{spread(block)}, Entries: entries})
	}
	again := func() {
		for i := 1; i <= 20; i++ {
			look(i, uint32(i))
		}
	}
	again()
	look(98)
	if got := h.Victim(now, 1, spread(98), noneHeld{}); got == pool.Refused {
		t.Error("a block is refused after a few look-ups")
	}
	for range 20 {
		again()
	}
	look(99)
	if got := h.Victim(now, 1, spread(99), noneHeld{}); got != pool.Refused {
		t.Errorf("victim %d for a block that was never used again, and all others were", got)
	}
	if got := h.Victim(now, 1, 0, noneHeld{}); got == 0 || got > 20 {
		t.Errorf("victim %d for a block without a print", got)
	}
	if got := h.Victim(now, 1, spread(-5), noneHeld{}); got == 0 || got > 20 {
		t.Errorf("victim %d for a block of which nothing is known", got)
	}
	if got := h.Report().Refused; got != 1 {
		t.Errorf("%d refused, want 1", got)
	}
}
