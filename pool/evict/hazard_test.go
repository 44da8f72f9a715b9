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
		t.Errorf("%d bytes per entry, at most 64", n)
	}
	if n := unsafe.Sizeof(ghostSet{}); n > 16*ways {
		t.Errorf("%d bytes for %d ghosts, at most 16 for each", n, ways)
	}
	if n := unsafe.Sizeof(awaitedSet{}); n > 16*places {
		t.Errorf("%d bytes for %d awaited blocks, at most 16 for each", n, places)
	}
}

// TestStateOfAFullPool adds up what is held when each entry is a run and LRU would have none of
// them.
func TestStateOfAFullPool(t *testing.T) {
	h := NewHazard()
	const entries = 20_000
	w := newLRUWorld(h, entries)
	for block := range uint32(entries) {
		w.look(block)
	}
	for block := range uint32(2 * entries) {
		h.missBudget.blocks, h.judge = 1e6, judge{}
		h.prefer(func(bin int) float32 { return float32(bin + 1) })
		w.look(entries + block)
	}
	if h.lost < entries*9/10 || int(h.nodes.runs.made) < entries {
		t.Fatalf("%d lost blocks and %d runs of %d entries: the test tests nothing", h.lost, h.nodes.runs.made, entries)
	}
	const page = pageLen * 64 // more than any page takes
	remembered := (h.ghosts.sets*ways + h.awaited.sets*places) * 16
	most := entries*64 + int(remembered) + int(unsafe.Sizeof(*h)+unsafe.Sizeof(kind{})) + 7*page
	if got := h.Report().Bytes; got > int64(most) {
		t.Errorf(
			"%d bytes for %d entries, %d lost blocks, %d ghosts, at most %d", got, entries, h.lost, h.ghosts.count,
			most,
		)
	}
	if h.lost > h.entries+h.entries/grains {
		t.Errorf("%d lost blocks, %d entries", h.lost, h.entries)
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
	if got := usesOf(h.nodes.runOf(h.nodes.at(1)).class); got != 1 {
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
	if got := h.nodes.runOf(h.nodes.at(1)).used; got != 1000 {
		t.Errorf("the block was used at %d ms, and it was not", got)
	}
}

// TestFallingBehindForgets looks up what LRU has and the pool has not.
func TestFallingBehindForgets(t *testing.T) {
	h := NewHazard()
	h.tables.use(3, 4)
	h.tables.settleAll()
	u := &pool.Use{Prints: make([]uint64, 60)}
	h.settleLookup(u, nil, missed{blocks: 50}, 0, false)
	if r := h.Report(); r.Alarms != 1 || !r.Fallback {
		t.Fatalf("%d alarms, LRU decides: %v; it is 50 hits behind LRU", r.Alarms, r.Fallback)
	}
	if got := h.tables.used[3][4]; got > 0.1 {
		t.Errorf("%g uses are still remembered", got)
	}
	for range 2 {
		h.settleLookup(u, nil, missed{blocks: 1}, 0, false)
	}
	if got := h.Report().Alarms; got != 1 {
		t.Errorf("%d alarms for one harm", got)
	}
}

// TestLRUDecidesAfterAnAlarm stores blocks of classes that are worth more the older they are.
func TestLRUDecidesAfterAnAlarm(t *testing.T) {
	h := NewHazard()
	for i := range 100 {
		far := make([]uint64, 1+i%5) // so that the blocks are of several classes
		for j := range far {
			far[j] = spread(1000*i + j)
		}
		h.Access(&pool.Use{Now: int64(i) * 1e9, BlockTokens: 512, Prints: far})
		h.Insert(
			&pool.Insertion{Now: int64(i) * 1e9, BlockTokens: 512, Entries: []uint32{uint32(i + 1)}, Prints: far[:1]},
		)
	}
	h.missBudget.blocks = 1e6
	h.prefer(func(bin int) float32 { return float32(bin + 1) })
	if got := h.Victim(100e9, 1, noneHeld{}); got == 1 {
		t.Fatal("the oldest goes though it is worth most")
	}
	behind := &pool.Use{Prints: make([]uint64, 5000)}
	h.settleLookup(behind, nil, missed{blocks: 5000}, 0, false)
	for want := uint32(1); want <= 50; want++ {
		got := h.Victim(100e9, 1, noneHeld{})
		if got != want {
			t.Fatalf("victim %d after an alarm, the one used least recently is %d", got, want)
		}
		h.Remove([]uint32{got})
	}
	h.judge.note(0, 4900, 0, 0, 0) // the harm is made up for, almost
	if h.judge.harm {
		h.judge.note(1_000_000, 0, 0, 0, 0)
	}
	h.missBudget.blocks = 1e6
	if got := h.Victim(100e9, 1, noneHeld{}); got == 51 {
		t.Fatal("LRU decides for ever")
	}
}

// prefer gives entries of a bin a worth.
func (h *Hazard) prefer(worth func(bin int) float32) {
	for c := range h.worths {
		for b := range h.worths[c] {
			h.worths[c][b] = worth(b)
		}
		for i := range h.kinds[0].half {
			h.kinds[0].half[i].settle(c, &h.worths[c])
		}
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
		g.put(&lateGhost{spread(i), uint32(i), makeInfo(uint16(i%numClasses), i%numBins), uint8(i % pool.MaxKinds)})
	}
	lost := 0
	for i := range n {
		s, w := g.find(spread(i))
		if w < 0 {
			lost++
			continue
		}
		if info := s.info[w]; int(info.class()) != i%numClasses || info.bin() != i%numBins ||
			s.way[w].used != uint32(i) || int(s.kind[w]) != i%pool.MaxKinds {
			t.Fatalf("ghost %d came back as class %d, bin %d, used %d", i, info.class(), info.bin(), s.way[w].used)
		}
	}
	if lost > n/100 {
		t.Errorf("%d of %d ghosts lost in a table with room for 8 times as many", lost, n)
	}
}

// TestLateGhostsAreFound checks that a ghost is found whether it is in its set yet or not, and that
// a set replaces its oldest.
func TestLateGhostsAreFound(t *testing.T) {
	var late, prompt ghosts
	late.grow(0, 0)
	prompt.grow(0, 0)
	const n = 3*minSets*ways/2 + lateGhosts/2 // more than fit, and the last of them are late
	for i := range n {
		info := makeInfo(uint16(i%numClasses), i%numBins)
		late.putLate(spread(i), uint32(i), info, uint8(i%pool.MaxKinds))
		prompt.put(&lateGhost{spread(i), uint32(i), info, uint8(i % pool.MaxKinds)})
	}
	if late.lates == 0 {
		t.Fatal("none is late: the test tests nothing")
	}
	for i := n - 1; i >= 0; i-- {
		a, w := late.find(spread(i))
		b, want := prompt.find(spread(i))
		if w != want || w >= 0 && (a.way[w] != b.way[w] || a.info[w] != b.info[w] || a.kind[w] != b.kind[w]) {
			t.Fatalf("ghost %d is in way %d, put at once it is in way %d", i, w, want)
		}
	}
	if late.count != prompt.count {
		t.Errorf("%d ghosts are counted, put at once %d", late.count, prompt.count)
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

// TestAPromptAgesAsOne stores a prompt, whose blocks are of few classes: it makes few runs, and
// they pass from bin to bin whole.
func TestAPromptAgesAsOne(t *testing.T) {
	h := NewHazard()
	in := pool.Insertion{BlockTokens: 512}
	for i := range 200 {
		in.Entries, in.Prints = append(in.Entries, uint32(i+1)), append(in.Prints, spread(i))
	}
	h.kind(0, 0).recency.grain = 200 // as in a pool of 25,600 blocks
	h.Insert(&in)
	if h.nodes.runs.made > distances {
		t.Errorf("%d runs of a prompt's blocks, which are at %d distances from its end", h.nodes.runs.made, distances)
	}
	h.age(ends[0], blocksAnAgeing)
	h.age(ends[0], 10*blocksAnAgeing)
	h.tables.settleAll()
	passed := float32(0)
	for c := range numClasses {
		passed += h.tables.risk[c][1]
	}
	if passed != 200 {
		t.Errorf("%g blocks passed into the next bin, 200 were there", passed)
	}
	if err := h.Check(); err != nil {
		t.Error(err)
	}
}

// TestAwaitedGrowWithoutLoss notes blocks while the table grows set by set, then takes them.
func TestAwaitedGrowWithoutLoss(t *testing.T) {
	var a awaited
	a.grow(0, 0)
	const n = 20_000
	for i := range n {
		a.grow(i*4, 2)
		a.put(spread(i), uint16(i%7))
		a.put(spread(i), uint16(i%numClasses)) // looked up again
	}
	lost := 0
	for i := range n {
		class, ok := a.take(spread(i))
		if !ok {
			lost++
		} else if int(class) != i%numClasses {
			t.Fatalf("block %d is of class %d, want %d", i, class, i%numClasses)
		}
		if _, ok := a.take(spread(i)); ok {
			t.Fatalf("block %d was taken twice", i)
		}
	}
	if lost > n/100 {
		t.Errorf("%d of %d lost in a table with room for 4 times as many", lost, n)
	}
}
