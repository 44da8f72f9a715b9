package agent

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/ipc"
)

// registerCells registers a worker that holds shards 0 and 1, each in a half of its memory.
func (c *client) registerCells(m *ipc.Register) *ipc.Registered {
	c.t.Helper()
	m.Held, m.Shards = []uint32{0, 1}, 2
	m.Groups = []ipc.GroupDesc{{BlockTokens: testBlockTokens, NumBlocks: testBlocks / 2}}
	regions, fds, segments := c.prepare(m)
	m.Segments = 2
	c.send(m)
	c.send(regions, fds...)
	for _, shard := range []uint32{1, 0} { // in any order
		part := *segments
		part.Shard, part.List = shard, []ipc.SegmentDesc{segments.List[0]}
		part.List[0].Offset = uint64(shard) * testBlocks / 2 * testBlockBytes
		c.send(&part)
	}
	return next[*ipc.Registered](c)
}

// TestShapesShare: a worker with two shards and two workers with one each load what the others
// saved.
func TestShapesShare(t *testing.T) {
	r := newRig(t, withPool(8<<20))
	whole := r.dial()
	reg := register("whole")
	reg.LookupName = "look"
	answer := whole.registered(whole.registerCells(reg))
	parts := make([]*client, 2)
	for rank := range parts {
		one := register("parts")
		one.World, one.Rank, one.Shards, one.Held = 2, uint32(rank), 2, []uint32{uint32(rank)}
		parts[rank] = r.dial()
		if got := parts[rank].registered(parts[rank].registerWorker(one)); got.Space != answer.Space {
			t.Fatalf("space %x, want %x, that of the worker with both shards", got.Space, answer.Space)
		}
	}
	look, there, back := r.asker("look"), chain(1, 2), chain(2, 2)
	for b := range 2 {
		whole.fill(b, byte(b))
		whole.fill(testBlocks/2+b, byte(10+b))
	}
	if got := whole.save(answer.Epoch, there, 0); !all(got, blockOK) || len(got) != 2 {
		t.Fatalf("save of both shards %v, want two blocks ok", got)
	}
	for rank, one := range parts {
		if got := one.load(answer.Epoch, 0, there, 4); !all(got, blockOK) {
			t.Fatalf("rank %d loads %v", rank, got)
		}
		for b := range 2 {
			if !one.filled(4+b, byte(10*rank+b)) {
				t.Errorf("rank %d, block %d: other bytes than were saved", rank, b)
			}
			one.fill(b, byte(20+10*rank+b))
		}
		if got := whole.load(answer.Epoch, 0, back, 4); !all(got, blockMissing) {
			t.Fatalf("load of a block of which %d of 2 shards are stored: %v", rank, got)
		}
		if got := one.save(answer.Epoch, back, 0); !all(got, blockOK) {
			t.Fatalf("rank %d saves %v", rank, got)
		}
	}
	question := ipc.LookupRequest{Tokens: 1000, HashLen: 32, Hashes: back}
	if got := ask(t, look, question); got.Tokens != 2*testBlockTokens {
		t.Errorf("looked up %+v, want %d tokens", got, 2*testBlockTokens)
	}
	if got := whole.load(answer.Epoch, 0, back, 4); !all(got, blockOK) {
		t.Fatalf("load of both shards %v", got)
	}
	for b := range 2 {
		if !whole.filled(4+b, byte(20+b)) || !whole.filled(testBlocks/2+4+b, byte(30+b)) {
			t.Errorf("block %d: other bytes than were saved", b)
		}
	}
}

// TestSegmentsOfShards: each shard held needs segments, and no other gets any.
func TestSegmentsOfShards(t *testing.T) {
	for name, c := range map[string]struct {
		shards []uint32 // of the segments that are sent
		want   string
	}{
		"one without":  {[]uint32{1, 1}, "shard 0: segments: group 0 has none"},
		"one not held": {[]uint32{0, 2}, "segments: shard 2, allowed: one of those held, [0 1]"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newRig(t).dial()
			m := register("a")
			regions, fds, segments := w.prepare(m)
			m.Held, m.Shards, m.Segments = []uint32{0, 1}, 2, 2
			w.send(m)
			w.send(regions, fds...)
			for _, shard := range c.shards {
				part := *segments
				part.Shard = shard
				w.send(&part)
			}
			if got := next[*ipc.Registered](w); got.Status != ipc.RegRefused || !strings.Contains(got.Text, c.want) {
				t.Errorf("%+v, want a refusal that says %q", got, c.want)
			}
		})
	}
}

// TestEveryShardHasARank: the rank that would leave shards without one is refused, and ranks may
// hold different numbers of shards.
func TestEveryShardHasARank(t *testing.T) {
	r := newRig(t)
	seat := func(rank, world, shards uint32, held ...uint32) *ipc.Registered {
		m := register(fmt.Sprint("engine of ", world, " ranks, ", shards, " shards"))
		c := r.dial()
		regions, fds, segments := c.prepare(m)
		m.Rank, m.World, m.Held, m.Shards, m.Segments = rank, world, held, shards, uint32(len(held))
		c.send(m)
		c.send(regions, fds...)
		for _, shard := range held {
			part := *segments
			part.Shard = shard
			c.send(&part)
		}
		return next[*ipc.Registered](c)
	}
	for _, c := range []struct {
		rank, world, shards uint32
		held                []uint32
		want                string // empty: it is accepted
	}{
		{0, 3, 2, []uint32{1}, ""},
		{1, 3, 2, []uint32{1}, ""},
		{2, 3, 2, []uint32{1},
			"held: shards [1] of rank 2, the last one, leave 1 of 2 shards without a rank, allowed: every shard"},
		{2, 3, 2, []uint32{0}, ""},
		{0, 2, 4, []uint32{0}, ""},
		{1, 2, 4, []uint32{1, 2}, "leave 1 of 4 shards without a rank"},
		{1, 2, 4, []uint32{1, 2, 3}, ""},
		// Two stages of 2 and 6 layers, in 4 ranges of 2; both ranks of a stage hold the same.
		{0, 4, 4, []uint32{0}, ""},
		{1, 4, 4, []uint32{0}, ""},
		{3, 4, 4, []uint32{1, 2, 3}, ""},
		{2, 4, 4, []uint32{1, 2, 3}, ""},
		{0, 4, 3, []uint32{0}, ""},
		{1, 4, 3, []uint32{0}, ""},
		{3, 4, 3, []uint32{0}, ""},
		{2, 4, 3, []uint32{0}, "leave 2 of 3 shards without a rank"},
		{2, 4, 3, []uint32{1, 2}, ""},
		{0, 1, 5, []uint32{0}, "leave 4 of 5 shards without a rank"},
	} {
		got := seat(c.rank, c.world, c.shards, c.held...)
		if refused := got.Status == ipc.RegRefused; refused != (c.want != "") || !strings.Contains(got.Text, c.want) {
			t.Errorf("rank %d of %d holds %v of %d shards: %+v, want %q", c.rank, c.world, c.held, c.shards, got,
				c.want)
		}
	}
}
