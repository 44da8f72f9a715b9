package dram

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// BenchmarkSaveShards reserves and commits entries of so many shards, shard by shard, in a full
// pool, without the bytes.
func BenchmarkSaveShards(b *testing.B) {
	const chainLen = 16
	for _, shards := range []int{1, 8, 64, pool.MaxShards} {
		b.Run(fmt.Sprint(shards), func(b *testing.B) {
			p, err := Open(Options{Bytes: 256 << 20, SlabBytes: 1 << 20, Virtual: true})
			if err != nil {
				b.Fatal(err)
			}
			defer p.Close()
			id, err := p.OpenSpace(pool.Spec{Shards: shards,
				Groups: []pool.Group{{BlockTokens: 16, ShardBytes: slices.Repeat([]uint32{1024}, shards)}}})
			if err != nil {
				b.Fatal(err)
			}
			number := 0
			save := func() {
				h := randomChain(nil, number, chainLen)
				number++
				for shard := range shards {
					batch := pool.Batch{
						Space: id, Shard: uint8(shard), Epoch: 1, Hashes: h,
						Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
					}
					p.Reserve(&batch)
					p.Commit(batch.Slots, 1, batch.Status)
				}
			}
			for number < 2*(256<<10)/chainLen/shards {
				save()
			}
			report := reportCPU(b, chainLen*shards)
			for b.Loop() {
				save()
			}
			report()
		})
	}
}
