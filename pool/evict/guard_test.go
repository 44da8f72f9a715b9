package evict

import (
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// TestMissBudgetIsEarnedAndSpent follows the miss budget: it starts at 0, grows with blocks looked
// up and with gains, and falls with losses.
func TestMissBudgetIsEarnedAndSpent(t *testing.T) {
	const entries = 1000
	var c missBudget
	may := func() float64 { return c.mayLose(0) }
	c.record(0, 10_000, entries)
	if may() <= 0 || may() > 0.01*10_000 {
		t.Errorf("%g blocks may be lost after 10,000 blocks that tell nothing", may())
	}
	given := may()
	if c.record(50, 0, entries); may() != given+50 {
		t.Errorf("%g blocks may be lost after 50 won, %g before", may(), given)
	}
	if c.record(-80, 0, entries); may() != given-30 {
		t.Errorf("%g blocks may be lost after 80 lost, %g before", may(), given+50)
	}
	if c.record(1e6, 0, entries); may() > entries {
		t.Errorf("%g blocks may be lost of %d", may(), entries)
	}
	c.record(-1e6, 0, entries)
	if c.record(0, entries*3/4/giftShare, entries); may() > -entries/5 {
		t.Errorf("%g blocks may be lost when three quarters of a debt of all entries are paid", may())
	}
	if c.record(0, 1e6, entries); may() <= 0 {
		t.Errorf("%g blocks may be lost long after a great loss: LRU decides for ever", may())
	}
}

// TestTrustIsWonSlowlyAndLostAtOnce does not ask for lost blocks of prompts of 20 blocks, and then
// asks for some.
func TestTrustIsWonSlowlyAndLostAtOnce(t *testing.T) {
	const entries, lost = 10_000, 500
	var c missBudget
	for range 1000 {
		c.record(1, 20, entries)
	}
	if got := c.mayLose(lost); got != c.blocks {
		t.Errorf("%g blocks may be lost, the budget is %g, and nothing is known of those lost", got, c.blocks)
	}
	c.note(0, lost/2, entries)
	half := c.mayLose(lost)
	if c.note(0, lost/2, entries); half <= c.blocks || c.mayLose(lost) <= half ||
		c.mayLose(lost) > c.blocks+leadShare*1000*20 {
		t.Errorf(
			"%g blocks may be lost when half as many were not asked for, %g when as many; the budget is %g", half,
			c.mayLose(lost), c.blocks,
		)
	}
	if got := c.mayLose(20); got > 1.2*c.blocks {
		t.Errorf("%g blocks may be lost when those lost are of one prompt, the budget is %g", got, c.blocks)
	}
	if c.note(lost/10, 0, entries); c.mayLose(lost) != c.blocks {
		t.Errorf("%g blocks may be lost after a tenth was asked for, the budget is %g", c.mayLose(lost), c.blocks)
	}
	c.note(10, 0, entries)
	if c.note(0, 10*askedCost-1, entries); c.mayLose(lost) != c.blocks {
		t.Errorf("%g blocks may be lost, the budget is %g: what was asked for is forgotten", c.mayLose(lost), c.blocks)
	}
}

// TestLentByTheLead lends more to a policy that is ahead of LRU, up to a share of what was looked
// up, and nothing to one that LRU leads.
func TestLentByTheLead(t *testing.T) {
	const entries, lost = 10_000, 500
	lent := func(ahead int) float64 {
		var c missBudget
		for range 1000 {
			c.record(0, 20, entries)
		}
		c.record(ahead, 0, entries)
		c.note(0, lost, entries)
		return c.mayLose(lost) - c.blocks
	}
	if got := lent(0); got != 0 {
		t.Errorf("%g blocks are lent without a lead", got)
	}
	if got := lent(100); got < 99 || got > 101 {
		t.Errorf("%g blocks are lent at a lead of 100", got)
	}
	if got := lent(5000); got < leadShare*20_000-1 || got > leadShare*20_000+1 {
		t.Errorf("%g blocks are lent at a lead of 5,000, after 20,000 looked up", got)
	}
	if got := lent(-300); got != 0 {
		t.Errorf("%g blocks are lent to one that LRU leads", got)
	}
}

// TestWhatIsAskedForCostsTrust asks for a block that was lost.
func TestWhatIsAskedForCostsTrust(t *testing.T) {
	h := NewHazard()
	w := newLRUWorld(h, 300)
	for block := range uint32(600) {
		if w.look(block); block >= 300 {
			h.missBudget.blocks = 100
			h.prefer(func(bin int) float32 { return float32(bin + 1) })
		}
	}
	for _, block := range w.order {
		if w.entry[block] != 0 {
			continue
		}
		h.missBudget.calm = 100
		if w.look(block); h.missBudget.calm > 100-askedCost+1 { // one may have passed at the same time
			t.Errorf("what went unasked for counts %g after a lost block was asked for, was 100", h.missBudget.calm)
		}
		return
	}
	t.Fatal("nothing was lost: the test tests nothing")
}

// TestLRUNeverDecidesForEver gives LRU hits that the pool lacks whoever decides.
func TestLRUNeverDecidesForEver(t *testing.T) {
	const lost = 30
	var j judge
	look := func() (begins bool) { return j.note(1000, 100, 105, lost, 0) }
	n := 1
	for ; !look(); n++ {
		if n > 100 {
			t.Fatalf("no alarm at %d hits fewer than LRU's after %d blocks looked up", j.lru-j.hits, j.lookups)
		}
	}
	deficit := 5 * n
	if float64(deficit) <= harmShare*1000*float64(n) {
		t.Errorf("an alarm at %d hits fewer than LRU's after %d blocks looked up", deficit, j.lookups)
	}
	for j.harm {
		if look(); int(j.lru-j.hits) > deficit+lost {
			t.Fatalf("%d hits fewer than LRU's count, it was %d at the alarm and %d blocks were lost",
				j.lru-j.hits, deficit, lost)
		}
		if n++; n > 100 {
			t.Fatalf("LRU still decides after %d blocks looked up", j.lookups)
		}
	}
	if got := float64(j.lru - j.hits); got > harmShare/2*float64(j.lookups) {
		t.Errorf("LRU stops deciding at %g hits fewer after %d blocks looked up", got, j.lookups)
	}
}

// TestFirstMissesAreNoHarm misses a few blocks that LRU has, of the first ones looked up.
func TestFirstMissesAreNoHarm(t *testing.T) {
	const entries = 10_000
	few := int(harmShare * harmLooks * entries)
	var j judge
	if j.note(1000, 0, few, 0, entries) {
		t.Errorf("an alarm at %d hits fewer than LRU's, in a pool of %d blocks", j.lru, entries)
	}
	if !j.note(0, 0, 1, 0, entries) {
		t.Errorf("no alarm at %d hits fewer than LRU's, after %d blocks looked up", j.lru, j.lookups)
	}
}

// lruWorld is a pool of single blocks that knows what LRU would have.
type lruWorld struct {
	noneHeld
	h     *Hazard
	order []uint32          // blocks, the one used last at the end
	used  map[uint32]uint32 // ms, of each block that was looked up
	entry map[uint32]uint32
	block []uint32
	free  []uint32
	now   int64
}

func newLRUWorld(h *Hazard, entries int) *lruWorld {
	w := &lruWorld{h: h, used: map[uint32]uint32{}, entry: map[uint32]uint32{}, block: make([]uint32, entries+1)}
	for e := entries; e > 0; e-- {
		w.free = append(w.free, uint32(e))
	}
	return w
}

// look looks a block up and stores it if it is missing.
func (w *lruWorld) look(block uint32) {
	w.now += 1e9 // ns: no request is repeated at once
	u := pool.Use{Now: w.now, BlockTokens: 512, Prints: []uint64{spread(int(block))}}
	if e := w.entry[block]; e != 0 {
		u.Entries = []uint32{e}
	}
	w.h.Access(&u)
	w.remember(block)
	w.used[block] = uint32(w.h.clock.now)
	if u.Entries != nil {
		return
	}
	if len(w.free) == 0 {
		e := w.h.Victim(w.now, 1, w)
		w.h.Remove([]uint32{e})
		delete(w.entry, w.block[e])
		w.free = append(w.free, e)
	}
	e := w.free[len(w.free)-1]
	w.free = w.free[:len(w.free)-1]
	w.entry[block], w.block[e] = e, block
	w.h.Insert(&pool.Insertion{Now: w.now, BlockTokens: 512, Entries: []uint32{e}, Prints: u.Prints})
}

func (w *lruWorld) remember(block uint32) {
	for i, b := range w.order {
		if b == block {
			w.order = append(w.order[:i], w.order[i+1:]...)
			break
		}
	}
	if w.order = append(w.order, block); len(w.order) > len(w.block)-1 {
		w.order = w.order[1:]
	}
}

// missing returns the blocks that LRU would have and the pool has not, and all that LRU would have,
// as far back as the policy looks.
func (w *lruWorld) missing() (lost, all int) {
	for block, used := range w.used {
		if w.h.kinds[0].recency.has(used) {
			if all++; w.entry[block] == 0 {
				lost++
			}
		}
	}
	return lost, all
}

// TestMissingIsCountedAndBounded compares the count of blocks that LRU would have and the pool has
// not with a slow one, and with the number that may be lost at once, in a pool that LRU would fill
// differently. LRU has the room of the pool, to a grain.
func TestMissingIsCountedAndBounded(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	const entries = 300
	h := NewHazard()
	w := newLRUWorld(h, entries)
	far, ahead, looked := 0, 0, 0
	for i := range 20_000 {
		block := uint32(i + 1000)
		if r.IntN(2) == 0 {
			block = uint32(r.IntN(400)) // more than fits
		}
		h.missBudget.calm = 0 // the bound does not cover blocks that trust allows
		used, known := w.used[block]
		had, has := known && h.kinds[0].recency.has(used), w.entry[block] != 0
		w.look(block)
		if looked++; has != had {
			if ahead++; had {
				ahead -= 2
			}
		}
		got, all := w.missing()
		if h.lost != got {
			t.Fatalf("look-up %d: counts %d missing, there are %d", i, h.lost, got)
		}
		if i > 2*entries && (all < entries-1-entries/grains || all > entries+entries/grains) {
			t.Fatalf("look-up %d: LRU is taken to have %d blocks, it has room for %d", i, all, entries)
		}
		if may := float64(entries)/lent + float64(ahead) + giftShare*float64(looked); float64(got) > may {
			t.Fatalf(
				"risks more than its budget: look-up %d: %d are missing, and %d ahead after %d only %.1f may be", i,
				got, ahead, looked, may,
			)
		}
		far = max(far, got)
		if i%50 == 0 {
			if err := h.Check(); err != nil {
				t.Fatalf("look-up %d: %v", i, err)
			}
		}
	}
	if far < 20 {
		t.Errorf("at most %d blocks were missing: the policy never decided", far)
	}
	if err := h.Check(); err != nil {
		t.Error(err)
	}
}
