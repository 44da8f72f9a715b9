package evict

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// inUse is a pool with a chain of entries 1 to end, of which the end is held, and others without
// chains.
type inUse struct{ end, asked uint32 }

func (v *inUse) Child(e uint32) uint32 {
	v.asked++
	if e < v.end {
		return e + 1
	}
	return 0
}

func (v *inUse) Held(e uint32) bool { return e == v.end }

// TestChainInUseIsPassedOverAsAWhole looks for victims where the blocks with the least worth are
// those of a long chain in use: each is passed over once, and the descent to its end is walked
// once, not from each entry.
func TestChainInUseIsPassedOverAsAWhole(t *testing.T) {
	const end, others = 3000, 100
	h := NewHazard()
	for e := uint32(end + 1); e <= end+others; e++ {
		h.Insert(&pool.Insertion{
			Now: int64(e) * 1e6, BlockTokens: 512, Entries: []uint32{e}, Prints: []uint64{spread(int(e))},
		})
	}
	const now = 100e9
	in := pool.Insertion{Now: now - 10e6, BlockTokens: 512}
	for e := uint32(1); e <= end; e++ {
		in.Entries, in.Prints = append(in.Entries, e), append(in.Prints, spread(int(e)))
	}
	h.Access(&pool.Use{Now: in.Now, BlockTokens: 512, Prints: in.Prints})
	h.Insert(&in)
	h.Access(&pool.Use{Now: now, BlockTokens: 512, Prints: []uint64{spread(1), spread(-1)}, Entries: []uint32{1}})
	v := &inUse{end: end}
	for i := range others {
		h.missBudget.blocks, h.judge = 1e6, judge{}
		h.prefer(func(bin int) float32 { return float32(bin + 1) })
		got := h.Victim(now, 1, v)
		if got <= end {
			t.Fatalf("victim %d of %d is %d, entries up to %d are in use", i, others, got, end)
		}
		h.Remove([]uint32{got})
	}
	if v.asked > 10*end {
		t.Errorf("%d questions to pass over a chain of %d and evict %d", v.asked, end, others)
	}
	if err := h.Check(); err != nil {
		t.Error(err)
	}
}

// TestEvictsPastChainsInUse stores a block in the ms in which all others were found in use,
// and evicts it.
func TestEvictsPastChainsInUse(t *testing.T) {
	const end, now = 20, int64(100e9)
	h := NewHazard()
	in := pool.Insertion{Now: now, BlockTokens: 128}
	for e := uint32(1); e <= end; e++ {
		in.Entries, in.Prints = append(in.Entries, e), append(in.Prints, spread(int(e)))
	}
	h.Insert(&in)
	v := &inUse{end: end}
	if got := h.Victim(now, 1, v); got != 0 {
		t.Fatalf("victim %d is in use", got)
	}
	h.Insert(&pool.Insertion{Now: now, BlockTokens: 128, Entries: []uint32{end + 1}, Prints: []uint64{spread(end + 1)}})
	if got := h.Victim(now, 1, v); got != end+1 {
		t.Errorf("victim %d, %d could go", got, end+1)
	}
	if err := h.Check(); err != nil {
		t.Error(err)
	}
}
