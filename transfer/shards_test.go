package transfer

import (
	"bytes"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// cellSpec is a space whose entries have four shards, one for each segment of layout.
func cellSpec() pool.Spec {
	return pool.Spec{
		Fingerprint: pool.Fingerprint{2}, Identity: []byte("cells"), Shards: 4,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: slices.Repeat([]uint32{piece}, 4)}},
	}
}

// cells configures a worker that holds these shards of cellSpec, in batches of few blocks.
func cells(shards ...uint8) func(*Config) {
	return func(c *Config) {
		segments := layout().Groups[0].Segments
		held := func(shard uint8) Held {
			return Held{shard, Layout{[]GroupLayout{{NumBlocks: blocks, Segments: segments[shard : shard+1]}}}}
		}
		c.Spec, c.Held = cellSpec(), nil
		for _, shard := range shards {
			c.Held = append(c.Held, held(shard))
		}
		c.Limits = DefaultLimits
		c.Limits.BatchBytes = 6 * piece
	}
}

// expectCells compares the pieces of shards in an engine's block with the pattern of a seed.
func (s *station) expectCells(block uint32, seed uint64, shards ...uint8) {
	s.t.Helper()
	got, want := s.read(block), bytesOf(seed)
	for _, shard := range shards {
		from, to := int(shard)*piece, (int(shard)+1)*piece
		if !bytes.Equal(got[from:to], want[from:to]) {
			s.t.Fatalf("block %d, shard %d: other bytes", block, shard)
		}
	}
}

// TestAJobIsAboutAllShards: workers that hold other shards than the saver load its blocks, and the
// shards of a block may come from several savers.
func TestAJobIsAboutAllShards(t *testing.T) {
	n := newNode(t, 256)
	whole, low, high := n.join(t, cells(0, 1, 2, 3)), n.join(t, cells(1, 0)), n.join(t, cells(3, 2))
	const many = 17
	for i := range uint32(many) {
		whole.write(i, uint64(100+i))
		low.write(i, uint64(200+i))
		high.write(i, uint64(200+i))
	}
	whole.finish(save(1, section(0, 9, 0), section(9, many-9, 9)), pool.OK)
	whole.finish(save(2, section(0, many, 0)), pool.Exists)
	for _, s := range []*station{low, high} {
		s.finish(load(1, section(0, many, 40)), pool.OK)
	}
	low.finish(save(2, section(100, many, 0)), pool.OK)
	whole.finish(load(3, section(100, many, 40)), pool.Missing)
	high.finish(save(2, section(100, many, 0)), pool.OK)
	c := whole.finish(load(4, section(100, many, 40)), pool.OK)
	if c.Bytes != many*blockSize || len(c.Status) != many {
		t.Errorf("%d bytes of %d blocks", c.Bytes, len(c.Status))
	}
	for i := range uint32(many) {
		low.expectCells(40+i, uint64(100+i), 0, 1)
		high.expectCells(40+i, uint64(100+i), 2, 3)
		whole.expectCells(40+i, uint64(200+i), 0, 1, 2, 3)
	}
}

// TestABlockHasTheWorstStatusOfItsShards: one shard of one block is damaged in the pool.
func TestABlockHasTheWorstStatusOfItsShards(t *testing.T) {
	n := newNode(t, 64)
	s, low := n.join(t, cells(0, 1, 2, 3)), n.join(t, cells(0, 1))
	for i := range uint32(3) {
		s.write(i, uint64(i))
		low.write(i, uint64(i))
	}
	low.finish(save(1, section(1, 1, 1)), pool.OK)
	s.finish(save(1, section(0, 3, 0)), pool.OK) // also of the block of which two shards existed
	b := pool.Batch{Space: s.space, Shard: 2, Hashes: pool.Chain(chain(1, 1), hashLen), Status: make([]pool.Status, 1),
		Slots: make([]pool.Slot, 1)}
	s.pool.Acquire(&b)
	arena, _ := s.pool.Arena()
	arena[b.Slots[0].Off] ^= 1
	s.pool.Release(b.Slots, b.Status)
	s.submit(load(2, section(0, 3, 8)))
	if c := s.completion(); !slices.Equal(c.Status, []pool.Status{pool.OK, pool.Corrupt, pool.OK}) {
		t.Errorf("statuses %v, want the second to be corrupt", c.Status)
	}
	s.finish(load(3, section(1, 1, 8)), pool.Missing)
	job := save(4, section(50, 3, 0))
	job.Revoke = 0
	s.engine.Revoke(0)
	s.finish(job, Revoked)
	if stored := s.stored(50, 3); stored != 0 {
		t.Errorf("%d blocks of a revoked save are stored", stored)
	}
}

// asked counts the blocks for which room is sought, by shard.
type asked struct {
	Slots
	blocks map[uint8]int
}

func (a *asked) Reserve(b *pool.Batch) {
	a.blocks[b.Shard] += b.Hashes.N
	a.Slots.Reserve(b)
}

// TestOneShardLooksForRoom saves a chain longer than the pool. After its first block without room,
// the shards after the first one neither search nor store anything.
func TestOneShardLooksForRoom(t *testing.T) {
	const room, many = 8, 20
	n := newNode(t, room)
	a := &asked{n.pool, make(map[uint8]int)}
	s := n.join(t, func(c *Config) {
		cells(0, 1, 2, 3)(c)
		c.Slots, c.Limits.BatchBytes = a, 16*blockSize // a second batch begins in the middle
	})
	s.submit(save(1, section(0, many, 0)))
	for i, status := range s.completion().Status {
		if want := map[bool]pool.Status{true: pool.OK, false: pool.Busy}[i < room]; status != want {
			t.Errorf("block %d of the chain: status %d, want %d", i, status, want)
		}
	}
	for shard := range uint8(4) {
		if want := map[bool]int{true: 16, false: room}[shard == 0]; a.blocks[shard] != want {
			t.Errorf("shard %d looked for room for %d blocks, want %d", shard, a.blocks[shard], want)
		}
	}
	if got := s.stored(0, many); got != room {
		t.Errorf("%d blocks are stored, want %d", got, room)
	}
}
