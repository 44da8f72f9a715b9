package dram

import (
	"encoding/binary"
	"testing"

	"github.com/kvagent/kvagent/pool/dram/arena"
)

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
