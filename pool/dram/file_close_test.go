package dram

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram/arena"
)

// TestSpaceTooLargeForTheFile checks that a space whose record does not fit is reported once, and
// works.
func TestSpaceTooLargeForTheFile(t *testing.T) {
	var told []pool.Fingerprint
	o := Options{Bytes: 256 << 10, SlabBytes: 16 << 10, Path: shmPath(t)}
	o.SpaceNotKept = func(f pool.Fingerprint) { told = append(told, f) }
	p := reopen(t, o)
	defer closePool(t, p)
	wide := pool.Spec{Fingerprint: pool.Fingerprint{9}, Identity: make([]byte, 8<<10), Shards: pool.MaxShards}
	for range pool.MaxGroups {
		wide.Groups = append(wide.Groups,
			pool.Group{BlockTokens: 16, ShardBytes: slices.Repeat([]uint32{16}, pool.MaxShards)})
	}
	openSpec(t, p, keptSpec)
	openSpec(t, p, wide)
	openSpec(t, p, wide)
	if len(told) != 1 || told[0] != wide.Fingerprint {
		t.Errorf("told of %x, want %x once", told, wide.Fingerprint)
	}
}

// TestClosedSpaceLeavesTheFile checks that the record of a closed space is reused, and that nothing
// of the space is restored, whether its entries were swept before the process ended or not.
func TestClosedSpaceLeavesTheFile(t *testing.T) {
	o := Options{Bytes: 256 << 10, SlabBytes: 16 << 10, Path: shmPath(t)}
	h := randomChain(nil, 1, 4)
	p := reopen(t, o)
	spec := keptSpec
	for i := range uint32(arena.MaxSpaces + 10) {
		binary.LittleEndian.PutUint32(spec.Fingerprint[4:], i)
		id := openSpec(t, p, spec)
		if p.core.space(id).record == noRecord {
			t.Fatalf("space %d has no record in the file", i)
		}
		put(t, p, id, h)
		if err := p.CloseSpace(id); err != nil {
			t.Fatal(err)
		}
		if i%64 == 0 {
			p.Sweep()
		}
	}
	put(t, p, openSpec(t, p, keptSpec), h)
	closePool(t, p)
	p = reopen(t, o)
	defer closePool(t, p)
	if r := p.Info().Recovery; r.Spaces != 1 || r.Entries != h.N {
		t.Errorf(
			"%d spaces with %d blocks came back, want the one that was open, with %d; %+v", r.Spaces, r.Entries, h.N, r,
		)
	}
	if n := p.Prefix(openSpec(t, p, spec), 0, h); n != 0 {
		t.Errorf("%d blocks of a closed space came back", n)
	}
	if n := p.Prefix(openSpec(t, p, keptSpec), 0, h); n != h.N {
		t.Errorf("%d blocks of the open space came back, want %d", n, h.N)
	}
}
