package registration

import (
	"math"
	"testing"
)

func TestWholeBlocks(t *testing.T) {
	spec := func(groups ...[]uint32) [][]uint32 { // by shard
		sizes := make([][]uint32, len(groups[0]))
		for _, group := range groups {
			for shard, n := range group {
				sizes[shard] = append(sizes[shard], n)
			}
		}
		return sizes
	}
	for name, c := range map[string]struct {
		bytes int64
		sizes [][]uint32
		held  []uint32
		want  int64
	}{
		"one rank":                   {1000, spec([]uint32{64}), []uint32{0}, 1000},
		"two halves":                 {1000, spec([]uint32{64, 64}), []uint32{1}, 2000},
		"the larger of two":          {1000, spec([]uint32{16, 48}), []uint32{1}, 1333},
		"cells":                      {1000, spec([]uint32{8, 8, 8, 8}), []uint32{2, 3}, 2000},
		"the group that binds":       {1000, spec([]uint32{8, 8}, []uint32{24, 8}), []uint32{0}, 1333},
		"less than a block":          {1, spec([]uint32{64, 64}), []uint32{0}, 2},
		"nearly none":                {0, spec([]uint32{64}), []uint32{0}, 1},
		"more than bytes can number": {math.MaxInt64, spec([]uint32{1, 1 << 30}), []uint32{0}, math.MaxInt64},
	} {
		if got := WholeBlocks(c.bytes, c.sizes, c.held); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestLargestBlock(t *testing.T) {
	if got := LargestBlock([][]uint32{{8, 100, 3}, {8, 50, 300}}); got != 303 {
		t.Errorf("%d, want 303", got)
	}
	if got := LargestBlock(nil); got != 0 {
		t.Errorf("%d of no shard", got)
	}
}
