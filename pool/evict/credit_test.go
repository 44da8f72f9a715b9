package evict

import (
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// TestCreditIsWonAndLost follows what may be missing: from nothing, with what is looked up, up with a lead and down
// with losses.
func TestCreditIsWonAndLost(t *testing.T) {
	const entries = 1000
	var c credit
	if got := c.missing(entries); got != 0 {
		t.Errorf("%g blocks may be missing before anything was looked up", got)
	}
	c.book(0, 10_000, entries)
	given := c.missing(entries)
	if most := 0.02 * 10_000.; given <= 0 || given > most {
		t.Errorf("%g blocks may be missing after 10,000 blocks that tell nothing, at most %g", given, most)
	}
	c.book(50, 0, entries)
	if got := c.missing(entries); got < given+50 {
		t.Errorf("%g blocks may be missing with a lead of 50, %g without", got, given)
	}
	c.book(-50-c.gift, 0, entries)
	if got := c.missing(entries); got > 0 {
		t.Errorf("%g blocks may be missing when all that was given is lost", got)
	}
	c.book(-1e6, 0, entries)
	c.book(0, 1e6, entries)
	if got := c.missing(entries); got <= 0 {
		t.Errorf("%g blocks may be missing long after a great loss: LRU decides for ever", got)
	}
}

// lruWorld is a pool of single blocks that knows what LRU would have.
type lruWorld struct {
	nobody
	h     *Hazard
	order []uint32 // blocks, the one used last at the end
	entry map[uint32]uint32
	block []uint32
	free  []uint32
	now   int64
}

func newLRUWorld(h *Hazard, entries int) *lruWorld {
	w := &lruWorld{h: h, entry: map[uint32]uint32{}, block: make([]uint32, entries+1)}
	for e := entries; e > 0; e-- {
		w.free = append(w.free, uint32(e))
	}
	return w
}

// look looks a block up and stores it if it is missing.
func (w *lruWorld) look(block uint32) {
	w.now += 1e9 // ns: nobody asks again at once
	u := pool.Use{Now: w.now, BlockTokens: 512, Prints: []uint64{spread(int(block))}}
	if e := w.entry[block]; e != 0 {
		u.Entries = []uint32{e}
	}
	w.h.Access(&u)
	w.remember(block)
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

// missing is the blocks that LRU would have and the pool has not.
func (w *lruWorld) missing() (n int) {
	for _, b := range w.order {
		if w.entry[b] == 0 {
			n++
		}
	}
	return n
}

// TestMissingIsCountedAndBounded holds the count of what LRU would have and the pool has not to a slow one, and to
// what the credit allows, in a pool that LRU would keep differently.
func TestMissingIsCountedAndBounded(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	h := NewHazard()
	w := newLRUWorld(h, 300)
	far := 0
	for i := range 20_000 {
		block := uint32(i + 1000)
		if r.IntN(2) == 0 {
			block = uint32(r.IntN(400)) // more than fits
		}
		before, may := w.missing(), h.credit.missing(h.entries)
		w.look(block)
		h.shadow.fit()
		got := w.missing()
		if h.shadow.missing != got {
			t.Fatalf("look-up %d: counts %d missing, there are %d", i, h.shadow.missing, got)
		}
		if got > before && float64(before) > may+1 {
			t.Fatalf("look-up %d: %d are missing, were %d, may be %.1f", i, got, before, may)
		}
		far = max(far, got)
	}
	if far < 20 {
		t.Errorf("at most %d blocks were missing: the policy never decided", far)
	}
}
