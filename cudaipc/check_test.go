package cudaipc

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// TestRangesAgainstBigNumbers holds the range check to arithmetic that cannot overflow.
func TestRangesAgainstBigNumbers(t *testing.T) {
	const arena = 1 << 30
	random := rand.New(rand.NewPCG(11, 12))
	near := func(limits ...uint64) uint64 {
		return limits[random.IntN(len(limits))] + uint64(random.IntN(5)) - 2
	}
	for i := range 100_000 {
		size := near(3, 4096, 1<<40, 1<<43)
		p := &Base{Regions: map[RegionID]*Opened{1: {Size: size}}}
		run := Run{
			Region: 1, RegionOff: near(2, size, size-4096, math.MaxUint64, 1<<63, math.MaxUint64-size),
			ArenaOff: int64(near(2, arena, arena-4096, math.MaxInt64, 1<<63, math.MaxUint64)),
			Len:      uint32(near(2, 4096, math.MaxUint32)),
		}
		length := new(big.Int).SetUint64(uint64(run.Len))
		end := new(big.Int).Add(new(big.Int).SetUint64(run.RegionOff), length)
		arenaEnd := new(big.Int).Add(big.NewInt(run.ArenaOff), length)
		want := end.Cmp(new(big.Int).SetUint64(size)) <= 0 && run.ArenaOff >= 0 && arenaEnd.Cmp(big.NewInt(arena)) <= 0
		if got := p.checkRuns([]Run{run}, arena) == nil; got != want {
			t.Fatalf("%d: %+v of a region of %d bytes: allowed %v, want %v", i, run, size, got, want)
		}
	}
}
