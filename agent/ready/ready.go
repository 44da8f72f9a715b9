// Package ready decides whether the blocks that a look-up found can be loaded at once: all of them
// are in the agent's memory, with the bytes that were saved.
package ready

import (
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
)

// MaxBytes is the usual limit of a Checker.
const MaxBytes = 64 << 20

// Checker checks blocks. Its methods may run concurrently.
type Checker struct {
	Slots pool.Slots
	Arena []byte // the pool's, as mapped in this process; nil: no block is ready
	Sums  bool   // compare checksums; false: headers only, as at a load
	// MaxBytes is the most that one check reads, over all shards, because other look-ups of the
	// socket wait meanwhile. More is not ready.
	MaxBytes int64
}

// Result is the outcome of a check.
type Result uint8

// The results of Check.
const (
	Ready   Result = iota
	Unready        // not all in memory, too many bytes, more than one group, or not readable here
	Dropped        // some were not what had been saved, and are no longer stored
)

// Check checks the blocks of a space's only group that hold the tokens from own to end of a prompt.
// The caller has pinned them, so none is evicted meanwhile.
func (c *Checker) Check(rules *lookup.Space, spec *pool.Spec, hashes pool.Hashes, own, end uint32) Result {
	if len(rules.Groups) != 1 || len(c.Arena) == 0 {
		return Unready
	}
	h := rules.Blocks(hashes, 0, uint64(own), uint64(end))
	if h.N <= 0 || int64(h.N)*shardBytes(&spec.Groups[0]) > c.MaxBytes {
		return Unready
	}
	b := pool.Batch{
		Space: rules.ID, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
	for shard := range spec.Groups[0].ShardBytes {
		b.Shard = uint8(shard)
		if result := c.checkShard(&b, spec.Fingerprint); result != Ready {
			return result
		}
	}
	return Ready
}

// checkShard checks one shard of each block.
func (c *Checker) checkShard(b *pool.Batch, space pool.Fingerprint) Result {
	c.Slots.Acquire(b)
	result := Ready
	held, ends := b.Slots[:0:0], b.Status[:0:0]
	for i, status := range b.Status {
		switch {
		case status == pool.Corrupt:
			result = Dropped
		case status != pool.OK:
			result = max(result, Unready)
		default:
			end := pool.OK
			key := pool.Key{Space: space, Group: b.Group, Shard: b.Shard, Hash: pool.MakeHash(b.Hashes.At(i))}
			if c.Sums && !c.sound(&key, b.Slots[i]) {
				result, end = Dropped, pool.Corrupt
			}
			held, ends = append(held, b.Slots[i]), append(ends, end)
		}
	}
	c.Slots.Release(held, ends)
	return result
}

// sound reports whether a slot has the bytes that were saved in it.
func (c *Checker) sound(key *pool.Key, s pool.Slot) bool {
	mem, sum := c.Arena[s.Off:s.Off+int64(s.Len)], uint32(0)
	if pagefault.Guard(mem, nil, func() { sum = pool.Sum(key.Seed(s.Len), mem) }) != nil {
		c.Slots.Probe(s)
		return false
	}
	return sum == s.Sum
}

func shardBytes(g *pool.Group) (n int64) {
	for _, bytes := range g.ShardBytes {
		n += int64(bytes)
	}
	return n
}
