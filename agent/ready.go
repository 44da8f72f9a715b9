package agent

import (
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
)

// maxReadyBytes is the usual limit of a check.
const maxReadyBytes = 64 << 20

// readiness finds out whether the blocks that a look-up found can be loaded at once: all of them
// are in the agent's memory, with the bytes that were saved. Its methods may run concurrently.
type readiness struct {
	slots pool.Slots
	arena []byte // the pool's, as mapped in this process; nil: no block is ready
	sums  bool   // compare checksums; false: headers only, as at a load
	// maxBytes is the most that one check reads, over all shards, because other look-ups of the
	// socket wait meanwhile. More is not ready.
	maxBytes int64
}

// verdict is the outcome of a check.
type verdict uint8

const (
	isReady    verdict = iota
	isNotReady         // not all in memory, too many bytes, more than one group, or not readable here
	wasDropped         // some were not what had been saved, and are no longer stored
)

// check checks the blocks of a space's only group that hold the tokens from own to end of a prompt.
// The caller has pinned them, so none is evicted meanwhile.
func (c *readiness) check(rules *lookup.Space, spec *pool.Spec, hashes pool.Hashes, own, end uint32) verdict {
	if len(rules.Groups) != 1 || len(c.arena) == 0 {
		return isNotReady
	}
	h := rules.Blocks(hashes, 0, uint64(own), uint64(end))
	if h.N <= 0 || int64(h.N)*shardBytes(&spec.Groups[0]) > c.maxBytes {
		return isNotReady
	}
	b := pool.Batch{
		Space: rules.ID, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
	for shard := range spec.Groups[0].ShardBytes {
		b.Shard = uint8(shard)
		if result := c.checkShard(&b, spec.Fingerprint); result != isReady {
			return result
		}
	}
	return isReady
}

// checkShard checks one shard of each block.
func (c *readiness) checkShard(b *pool.Batch, space pool.Fingerprint) verdict {
	c.slots.Acquire(b)
	result := isReady
	held, ends := b.Slots[:0:0], b.Status[:0:0]
	for i, status := range b.Status {
		switch {
		case status == pool.Corrupt:
			result = wasDropped
		case status != pool.OK:
			result = max(result, isNotReady)
		default:
			end := pool.OK
			key := pool.Key{Space: space, Group: b.Group, Shard: b.Shard, Hash: pool.MakeHash(b.Hashes.At(i))}
			if c.sums && !c.sound(&key, b.Slots[i]) {
				result, end = wasDropped, pool.Corrupt
			}
			held, ends = append(held, b.Slots[i]), append(ends, end)
		}
	}
	c.slots.Release(held, ends)
	return result
}

// sound reports whether a slot has the bytes that were saved in it.
func (c *readiness) sound(key *pool.Key, s pool.Slot) bool {
	mem, sum := c.arena[s.Off:s.Off+int64(s.Len)], uint32(0)
	if pagefault.Guard(mem, nil, func() { sum = pool.Sum(key.Seed(s.Len), mem) }) != nil {
		c.slots.Probe(s)
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
