package dram

import (
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// twoSlabs is a pool of two slabs, full of a model's entries of 1 KiB.
func twoSlabs(t *testing.T) (*Pool, pool.Hashes) {
	p, err := Open(Options{Bytes: 64 << 10, SlabBytes: 32 << 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	if _, err := p.OpenSpace(pool.Spec{Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{1024}}}}); err != nil {
		t.Fatal(err)
	}
	var blob []byte
	for i := range byte(64) {
		blob = append(blob, i)
	}
	h := pool.Chain(blob, 1)
	for i := range h.N { // no chain: each may go alone
		if got := reserve(p, 0, h.Slice(i, i+1)); got[0] != pool.OK {
			t.Fatalf("entry %d: status %d", i, got[0])
		}
	}
	return p, h
}

// reserve reserves and commits without writing.
func reserve(p *Pool, space pool.SpaceID, h pool.Hashes) []pool.Status {
	b := pool.Batch{Space: space, Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
	p.Reserve(&b)
	p.Commit(b.Slots, 1, b.Status)
	return b.Status
}

func check(t *testing.T, p *Pool) {
	t.Helper()
	if err := p.Check(); err != nil {
		t.Fatal(err)
	}
}

// TestHalfTakenEntryKeepsItsSlab asks for an entry whose second slot finds no room: the slab of its first slot,
// which no entry owns yet, must not be taken for it.
func TestHalfTakenEntryKeepsItsSlab(t *testing.T) {
	p, h := twoSlabs(t)
	wide, err := p.OpenSpace(pool.Spec{
		Fingerprint: pool.Fingerprint{1}, Shards: 2, Groups: []pool.Group{{ShardBytes: []uint32{9000, 5000}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	n, refs, _ := p.Pin(0, 0, h.Slice(32, 63), 1<<30, nil) // the second slab, all but one
	if n != 31 {
		t.Fatal("not stored")
	}
	ended := make(chan []pool.Status, 1)
	go func() { ended <- reserve(p, wide, pool.Chain([]byte{200}, 1)) }()
	select {
	case got := <-ended:
		if got[0] != pool.Busy {
			t.Fatalf("status %d, want Busy: one slab is pinned, the other is too small for both shards", got[0])
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a reservation hangs")
	}
	check(t, p)
	p.Unpin(refs)
	if got := reserve(p, wide, pool.Chain([]byte{201}, 1)); got[0] != pool.OK {
		t.Fatalf("status %d with nothing pinned, want OK", got[0])
	}
	check(t, p)
}

// TestSlabWithAPinIsNotTaken pins one entry in each slab: no slab can go to another class, and nothing is evicted in
// vain.
func TestSlabWithAPinIsNotTaken(t *testing.T) {
	p, h := twoSlabs(t)
	other, err := p.OpenSpace(pool.Spec{Fingerprint: pool.Fingerprint{1}, Shards: 1, Groups: []pool.Group{{ShardBytes: []uint32{5000}}}})
	if err != nil {
		t.Fatal(err)
	}
	_, refs, _ := p.Pin(0, 0, h.Slice(5, 6), 1<<30, nil)
	_, refs, _ = p.Pin(0, 0, h.Slice(40, 41), 1<<30, refs)
	if got := reserve(p, other, pool.Chain([]byte{200}, 1)); got[0] != pool.Busy {
		t.Fatalf("status %d, want Busy", got[0])
	}
	if s := p.Stats(); s.Entries != 64 || s.Evicted != 0 {
		t.Fatalf("%d entries left, %d evicted, and no slab came of it", s.Entries, s.Evicted)
	}
	p.Unpin(refs[1:])
	if got := reserve(p, other, pool.Chain([]byte{200}, 1)); got[0] != pool.OK {
		t.Fatalf("status %d with a slab free of pins, want OK", got[0])
	}
	if s := p.Stats(); s.Entries != 33 || s.Reassigned != 1 || p.Prefix(0, 0, h.Slice(5, 6)) != 1 {
		t.Fatalf("%+v, want the pinned entry's slab untouched", s)
	}
	check(t, p)
	p.Unpin(refs[:1])
}
