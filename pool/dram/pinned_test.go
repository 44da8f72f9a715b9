package dram

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/advisor"
	"github.com/kvagent/kvagent/pool/evict"
)

// eachOf calls do for each hash.
func eachOf(h pool.Hashes, do func(h pool.Hashes)) {
	for i := range h.N {
		do(h.Slice(i, i+1))
	}
}

// TestPinnedSlabsHideNoOther stores a block of another size in a pool whose oldest slabs, more than
// are looked at for one that can be taken, have pinned blocks: another slab is taken.
func TestPinnedSlabsHideNoOther(t *testing.T) {
	const perSlab = 16
	p, spaces := sizedSpaces(t, 16<<10, 20<<10)
	h := randomChain(nil, 1, 64*perSlab)
	eachOf(h, func(h pool.Hashes) { reserve(p, spaces[0], h) })
	refs, _ := p.PinEach(spaces[0], 0, h.Slice(1, (maxSurveys+1)*perSlab), nil)
	if got := reserve(p, spaces[1], randomChain(nil, 2, 1)); got[0] != pool.OK {
		t.Errorf("status %d, want OK: most slabs have no pinned block", got[0])
	}
	check(t, p)
	p.Unpin(refs)
	check(t, p)
}

// TestManyPinsKeepNothingElse stores a block behind more pinned ones than a part of a reservation
// passes over.
func TestManyPinsKeepNothingElse(t *testing.T) {
	for name, policy := range map[string]pool.Advisor{"by age": nil, "by a policy": asAdvisor(evict.NewLRU(), nil)} {
		t.Run(name, func(t *testing.T) {
			const blocks = 3 * maxRepairs
			p, err := Open(Options{Bytes: blocks << 10, SlabBytes: 1 << 20, Virtual: true, Advisor: policy})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { p.Close() })
			openOwnedSpace(t, p)
			h := randomChain(nil, 1, blocks-64)
			saveAs(p, 0, h, nil)
			refs, _ := p.PinEach(0, 0, h, nil)
			saveAs(p, 0, randomChain(nil, 2, 64), nil)
			revoked := false
			p.SetPressure(func(int64) bool { revoked = true; return false })
			if s := saveAs(p, 0, randomChain(nil, 3, 8), nil); count(s, pool.OK) != 8 || revoked {
				t.Errorf("statuses %v, leases revoked %v, want OK: 64 blocks are not pinned", s, revoked)
			}
			p.Unpin(refs)
		})
	}
}

// TestPinsOfAnEndedEpochKeepNothingElse evicts while there are fewer blocks than pins of an epoch
// that is over.
func TestPinsOfAnEndedEpochKeepNothingElse(t *testing.T) {
	for name, policy := range map[string]advisor.Policy{"by age": nil, "by a policy": evict.NewLRU()} {
		t.Run(name, func(t *testing.T) {
			p, _ := ownedWith(t, 0, policy)
			big, err := p.OpenSpace(pool.Spec{
				Fingerprint: pool.Fingerprint{1}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{4096}}},
			})
			if err != nil {
				t.Fatal(err)
			}
			old := randomChain(nil, 1, 160)
			saveAs(p, 0, old, nil)
			_, refs, _ := p.Pin(0, 0, old, 1<<30, nil)
			if _, err := p.ResetSpace(0); err != nil {
				t.Fatal(err)
			}
			p.Sweep()
			saveAs(p, 0, randomChain(nil, 2, 96), nil)
			if got := reserve(p, big, randomChain(nil, 3, 1)); got[0] != pool.OK {
				t.Errorf("status %d, want OK: 96 blocks can be evicted", got[0])
			}
			if s := saveAs(p, 0, randomChain(nil, 4, 8), nil); count(s, pool.OK) != 8 {
				t.Errorf("statuses %v, want OK", s)
			}
			p.Unpin(refs)
			check(t, p)
		})
	}
}

// TestPinnedBlocksAreRecentAfterwards evicts while the oldest blocks are pinned: others go, and
// once the pins end they are the last to go.
func TestPinnedBlocksAreRecentAfterwards(t *testing.T) {
	p, _ := owned(t, 0)
	h := randomChain(nil, 1, 256)
	eachOf(h, func(h pool.Hashes) { saveAs(p, 0, h, nil) })
	refs, _ := p.PinEach(0, 0, h.Slice(0, 64), nil)
	eachOf(randomChain(nil, 2, 10), func(h pool.Hashes) { saveAs(p, 0, h, nil) })
	if stored(p, h.Slice(0, 64)) != 64 || stored(p, h.Slice(64, 74)) != 0 {
		t.Fatal("not the oldest blocks that are not pinned were evicted")
	}
	check(t, p)
	p.Unpin(refs)
	check(t, p)
	eachOf(randomChain(nil, 3, 192), func(h pool.Hashes) { saveAs(p, 0, h, nil) })
	if n := stored(p, h.Slice(0, 64)); n != 64 {
		t.Errorf("%d of 64 blocks that were pinned are stored, want all: others are older", n)
	}
	check(t, p)
}
