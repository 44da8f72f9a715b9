package dram

import (
	"math/bits"

	"github.com/kvagent/kvagent/pool"
)

// inlineShards is the number of shards whose states the record of an entry holds, one bit each. A
// wide entry has more: its life counts them, and their bits are in core.wide.
const inlineShards = 16

// shardSet is a set of shards.
type shardSet [pool.MaxShards / 64]uint64

func (s *shardSet) has(shard uint8) bool { return s[shard/64]&(1<<(shard%64)) != 0 }
func (s *shardSet) add(shard uint8)      { s[shard/64] |= 1 << (shard % 64) }
func (s *shardSet) remove(shard uint8)   { s[shard/64] &^= 1 << (shard % 64) }

// wideShards holds the states of a wide entry's shards.
type wideShards struct{ present, writing shardSet }

// fullLife returns the value of recordState.present when all of n shards are present.
func fullLife(n int) uint16 {
	if n > inlineShards {
		return uint16(n)
	}
	return uint16(1<<n - 1)
}

// widen prepares an entry of n shards, and returns the flag of a wide one; false: no memory.
func (c *core) widen(e uint32, n int) (flag uint32, ok bool) {
	if n <= inlineShards {
		return 0, true
	}
	if !c.wide.Grow(int(e) + 1) {
		return 0, false
	}
	c.wide.All[e] = wideShards{}
	c.widest = max(c.widest, e+1)
	return flagWide, true
}

func (c *core) isPresent(e uint32, shard uint8) bool {
	if c.recs.All[e].is(flagWide) {
		return c.wide.All[e].present.has(shard)
	}
	return c.states.All[e].present&(1<<shard) != 0
}

func (c *core) isWriting(e uint32, shard uint8) bool {
	if c.recs.All[e].is(flagWide) {
		return c.wide.All[e].writing.has(shard)
	}
	return c.states.All[e].writing&(1<<shard) != 0
}

// beginWriting marks a shard as being written, which it was not.
func (c *core) beginWriting(e uint32, shard uint8) {
	l := &c.states.All[e]
	if c.recs.All[e].is(flagWide) {
		c.wide.All[e].writing.add(shard)
		l.writing++
		return
	}
	l.writing |= 1 << shard
}

func (c *core) endWriting(e uint32, shard uint8) {
	l := &c.states.All[e]
	if c.recs.All[e].is(flagWide) {
		c.wide.All[e].writing.remove(shard)
		l.writing--
		return
	}
	l.writing &^= 1 << shard
}

// setPresent marks a shard as committed, which it was not.
func (c *core) setPresent(e uint32, shard uint8) {
	l := &c.states.All[e]
	if c.recs.All[e].is(flagWide) {
		c.wide.All[e].present.add(shard)
		l.present++
		return
	}
	l.present |= 1 << shard
}

// presentCount returns how many shards are committed.
func (c *core) presentCount(e uint32) int {
	if n := c.states.All[e].present; c.recs.All[e].is(flagWide) {
		return int(n)
	} else {
		return bits.OnesCount16(n)
	}
}
