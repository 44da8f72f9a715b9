package registration

import (
	"math"
	"math/bits"
)

// WholeBlocks returns how many bytes whole blocks may have, so that the shards held of them have at
// most this many, whichever groups they are of. sizes are the bytes of one block, by shard, then
// group. It is at least 1.
func WholeBlocks(bytes int64, sizes [][]uint32, held []uint32) int64 {
	least := int64(math.MaxInt64)
	for g := range sizes[0] {
		var whole, part uint64
		for shard := range sizes {
			whole += uint64(sizes[shard][g])
		}
		for _, shard := range held {
			part += uint64(sizes[shard][g])
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
