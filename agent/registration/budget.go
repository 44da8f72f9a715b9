package registration

import (
	"math"
	"math/bits"

	"github.com/kvagent/kvagent/pool"
)

// WholeBlocks returns how many bytes whole blocks of a space may have, so that the shards held of
// them have at most this many, whichever groups they are of. It is at least 1.
func WholeBlocks(bytes int64, spec *pool.Spec, held []uint32) int64 {
	least := int64(math.MaxInt64)
	for g := range spec.Groups {
		var whole, part uint64
		for _, n := range spec.Groups[g].ShardBytes {
			whole += uint64(n)
		}
		for _, shard := range held {
			part += uint64(spec.Groups[g].ShardBytes[shard])
		}
		hi, lo := bits.Mul64(uint64(bytes), whole)
		if hi >= part {
			continue // more than any pool has
		}
		all, _ := bits.Div64(hi, lo, part)
		least = min(least, int64(min(all, math.MaxInt64)))
	}
	return max(least, 1)
}

// LargestBlock returns the bytes that a worker holds of one block, of the group where these are the
// most. sizes are those of its shards, by group.
func LargestBlock(sizes [][]uint32) (most int64) {
	if len(sizes) == 0 {
		return 0
	}
	for g := range sizes[0] {
		var sum int64
		for shard := range sizes {
			sum += int64(sizes[shard][g])
		}
		most = max(most, sum)
	}
	return most
}
