package transfer

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
)

// TestPlanIsTheLayout compares the runs of a plan, byte by byte, with the segments they were made
// of.
func TestPlanIsTheLayout(t *testing.T) {
	type place struct {
		region cudaipc.RegionID
		off    uint64
	}
	random := rand.New(rand.NewPCG(4, 4))
	for range 300 {
		g := GroupLayout{NumBlocks: 1 + uint32(random.IntN(10))}
		var next uint64
		var total uint32
		for range 1 + random.IntN(12) {
			s := Segment{Region: cudaipc.RegionID(random.IntN(2)), Offset: next,
				Stride: uint64(100 * (1 + random.IntN(2))), Bytes: 1 + uint32(random.IntN(20))}
			if random.IntN(3) == 0 {
				s.Offset = uint64(random.IntN(1000))
			}
			next = s.Offset + uint64(s.Bytes)
			total += s.Bytes
			g.Segments = append(g.Segments, s)
		}
		p, err := makePlan(&g, total)
		if err != nil {
			t.Fatal(err)
		}
		block := uint32(random.IntN(int(g.NumBlocks)))
		var want []place
		for _, s := range g.Segments {
			for i := range s.Bytes {
				want = append(want, place{s.Region, s.Offset + uint64(block)*s.Stride + uint64(i)})
			}
		}
		var got []place
		at := int64(5000)
		for _, r := range p.runs(nil, block, at) {
			if r.ArenaOff != at {
				t.Fatalf("a run goes to %d of the arena, want %d", r.ArenaOff, at)
			}
			for i := range r.Len {
				got = append(got, place{r.Region, r.RegionOff + uint64(i)})
			}
			at += int64(r.Len)
		}
		if len(got) != len(want) {
			t.Fatalf("%d bytes, want %d", len(got), len(want))
		}
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("byte %d is at %v, want %v", i, got[i], want[i])
			}
		}
	}
}

// TestNeighboursAreMerged expects a block-outermost layout to be one run, whatever the number of
// layers.
func TestNeighboursAreMerged(t *testing.T) {
	g := GroupLayout{NumBlocks: 100}
	for layer := range uint64(64) {
		g.Segments = append(g.Segments, Segment{Offset: layer * 4096, Stride: 64 * 4096, Bytes: 4096})
	}
	p, err := makePlan(&g, 64*4096)
	if err != nil {
		t.Fatal(err)
	}
	if runs := p.runs(nil, 7, 0); len(runs) != 1 || runs[0].RegionOff != 7*64*4096 || runs[0].Len != 64*4096 {
		t.Errorf("64 neighbours are %d runs: %+v", len(runs), runs[0])
	}
}

func TestLayoutsThatCannotBe(t *testing.T) {
	good := Segment{Offset: 0, Stride: 100, Bytes: 100}
	for name, try := range map[string]struct {
		want uint32
		g    GroupLayout
	}{
		"no segments":           {0, GroupLayout{NumBlocks: 1}},
		"too few bytes":         {101, GroupLayout{1, []Segment{good}}},
		"too many bytes":        {99, GroupLayout{1, []Segment{good}}},
		"sum is right mod 2^32": {100, GroupLayout{1, []Segment{good, {Bytes: 1 << 31}, {Bytes: 1 << 31}}}},
	} {
		if _, err := makePlan(&try.g, try.want); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
}
