package cuda

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
)

func newPlanner() *planner {
	return &planner{planLimits: planLimits{
		piece:    1 << 20,
		bytes:    1 << 18,
		minRows:  2,
		maxRows:  1 << 14,
		maxPitch: 1 << 31,
	}}
}

// bytesOf returns the two places of each byte that a plan copies, the slow way.
func bytesOf(rects []rect) map[[2]uint64]int {
	places := map[[2]uint64]int{}
	for _, r := range rects {
		for row := range r.rows {
			for i := range r.n {
				places[[2]uint64{r.dev + row*r.devPitch + i, r.off + row*r.offPitch + i}]++
			}
		}
	}
	return places
}

func single(spans []span) []rect {
	var rects []rect
	for _, s := range spans {
		rects = append(rects, rect{span: s, rows: 1})
	}
	return rects
}

// TestPlanCopiesTheSameBytes holds plans of random layouts to the list they were made from, byte by
// byte.
func TestPlanCopiesTheSameBytes(t *testing.T) {
	for seed := range uint64(400) {
		random := rand.New(rand.NewPCG(21, seed))
		p := newPlanner()
		p.piece, p.bytes, p.minRows = 1<<(5+random.IntN(6)), 1<<(3+random.IntN(6)), uint64(2+random.IntN(4))
		spans, blocks := layout(random)
		got := p.plan(spans, blocks)
		want, have := bytesOf(single(spans)), bytesOf(got)
		if len(want) != len(have) {
			t.Fatalf("seed %d: the plan copies %d bytes, the list %d", seed, len(have), len(want))
		}
		for place, n := range want {
			if have[place] != n {
				t.Fatalf("seed %d: byte %d of the GPU at %d of the arena: copied %d times, want %d", seed, place[0],
					place[1], have[place], n)
			}
		}
		for _, r := range got {
			if last := r.off + (r.rows-1)*r.offPitch + r.n - 1; r.rows > 1 && last/p.piece != r.off/p.piece ||
				(r.off+r.n-1)/p.piece != r.off/p.piece {
				t.Fatalf("seed %d: %+v goes over a piece of %d bytes", seed, r, p.piece)
			}
			if r.n*r.rows > p.bytes {
				t.Fatalf("seed %d: %+v is more than %d bytes", seed, r, p.bytes)
			}
		}
	}
}

// layout returns the spans of some blocks of some layers, in one of the orders that engines use,
// with what is not regular about them.
func layout(random *rand.Rand) ([]span, []cudaipc.Block) {
	blocks, layers, n := 1+random.IntN(6), 1+random.IntN(6), uint64(1+random.IntN(12))
	ids := random.Perm(4 * blocks)[:blocks]
	if random.IntN(2) == 0 {
		slices.Sort(ids)
	}
	if random.IntN(2) == 0 {
		for i := range ids {
			ids[i] = i
		}
	}
	var spans []span
	var counts []cudaipc.Block
	off := uint64(random.IntN(3))
	for _, id := range ids {
		runs := layers
		if random.IntN(10) == 0 {
			runs-- // a block that is not like the others
		}
		for l := range runs {
			s := span{dev: uint64(l)*1000 + uint64(id)*n, off: off, n: n}
			if random.IntN(3) == 0 {
				s.dev = uint64(id*layers+l) * n
			}
			off += n
			spans = append(spans, s)
		}
		counts = append(counts, cudaipc.Block{Runs: uint32(runs)})
	}
	return spans, counts
}

// TestPlanSeesWhatIsRegular checks the number of calls for the layouts that engines have.
func TestPlanSeesWhatIsRegular(t *testing.T) {
	const page, layers, blocks = 4 << 10, 32, 64
	for _, test := range []struct {
		name  string
		dev   func(block, layer uint64) uint64
		slot  func(block uint64) uint64
		calls int
	}{
		{
			"one run per block, all in a row", func(b, l uint64) uint64 { return (b*layers + l) * page },
			func(b uint64) uint64 { return b }, blocks * layers * page / (1 << 18),
		},
		{
			"layers apart, blocks in a row", func(b, l uint64) uint64 { return l<<30 + b*page },
			func(b uint64) uint64 { return b }, blocks,
		},
		{
			"layers anywhere, blocks in a row", func(b, l uint64) uint64 { return (l*l*7%97)<<20 + b*page },
			func(b uint64) uint64 { return b }, layers * blocks * layers * page >> 20,
		},
		{
			"layers apart, blocks anywhere", func(b, l uint64) uint64 { return l<<30 + (b*b*7%911)*page },
			func(b uint64) uint64 { return b }, blocks,
		},
		{
			"blocks of runs, slots in reverse", func(b, l uint64) uint64 { return (b*layers + l) * page },
			func(b uint64) uint64 { return blocks - b }, blocks,
		},
	} {
		var spans []span
		var counts []cudaipc.Block
		for b := range uint64(blocks) {
			for l := range uint64(layers) {
				spans = append(spans, span{test.dev(b, l), (test.slot(b)*layers + l) * page, page, 1})
			}
			counts = append(counts, cudaipc.Block{Runs: layers})
		}
		if got := len(newPlanner().plan(spans, counts)); got != test.calls {
			t.Errorf("%s: %d calls for %d runs, want %d", test.name, got, len(spans), test.calls)
		}
	}
}

func TestPlanOfNothing(t *testing.T) {
	if got := newPlanner().plan(nil, nil); len(got) != 0 {
		t.Errorf("a plan of nothing: %v", got)
	}
	if got := newPlanner().plan([]span{{5, 5, 0, 1}, {9, 9, 0, 1}}, []cudaipc.Block{{Runs: 2}}); len(got) != 0 {
		t.Errorf("a plan of empty runs: %v", got)
	}
}

func BenchmarkPlan(b *testing.B) {
	random := rand.New(rand.NewPCG(1, 1))
	var spans []span
	var counts []cudaipc.Block
	for i, id := range random.Perm(4096) {
		for l := range uint64(32) {
			spans = append(spans, span{l<<30 + uint64(id)*4096, (uint64(i)*32 + l) * 4096, 4096, 1})
		}
		counts = append(counts, cudaipc.Block{Runs: 32})
	}
	p := newPlanner()
	p.piece = 256 << 20
	for b.Loop() {
		p.plan(spans, counts)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(spans)), "ns/run")
}

// TestPlanStaysInARegion expects no call over two regions, which may be two allocations, however
// their addresses lie.
func TestPlanStaysInARegion(t *testing.T) {
	for name, spans := range map[string][]span{
		"side by side":     {{0, 0, 4096, 1}, {4096, 4096, 4096, 2}},
		"at a distance":    {{0, 0, 4096, 1}, {1 << 20, 8192, 4096, 2}},
		"a third far away": {{0, 0, 4096, 1}, {1 << 20, 8192, 4096, 2}, {2 << 20, 16384, 4096, 1}},
	} {
		if got := newPlanner().plan(spans, []cudaipc.Block{{Runs: uint32(len(spans))}}); len(got) != len(spans) {
			t.Errorf("%s: %d calls for %d regions: %v", name, len(got), len(spans), got)
		}
	}
}
