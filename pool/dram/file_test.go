package dram_test

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// memoryDir names a directory on hugetlbfs to run these tests in.
const memoryDir = "KVAGENT_TEST_MEMORY_DIR"

// keptPath returns a path for a pool's file, removed with the test.
func keptPath(t testing.TB) string {
	t.Helper()
	parent := "/dev/shm"
	if dir := os.Getenv(memoryDir); dir != "" {
		parent = dir
	}
	dir, err := os.MkdirTemp(parent, "kvagent-test-")
	if err != nil {
		t.Skipf("SKIPPED: pools that outlive their process need a tmpfs on /dev/shm: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "pool")
}

func openFile(t testing.TB, path string, o dram.Options) *dram.Pool {
	t.Helper()
	o.Path = path
	p, err := dram.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// spec is a space whose entries have shards of these sizes.
func spec(name string, shardBytes ...uint32) pool.Spec {
	s := pool.Spec{
		Identity: []byte(name), Shards: len(shardBytes),
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: shardBytes}},
	}
	copy(s.Fingerprint[:], name)
	return s
}

// chainOf is n hashes that belong to a number.
func chainOf(number uint64, n int) pool.Hashes {
	r := rand.New(rand.NewPCG(number, 1))
	blob := make([]byte, n*pool.MaxHashLen)
	for i := range blob {
		blob[i] = byte(r.Uint32())
	}
	return pool.Chain(blob, pool.MaxHashLen)
}

// content is what a shard holds: it follows from its key.
func content(hash []byte, shard uint8, n uint32) []byte {
	return bytes.Repeat([]byte{hash[0], hash[1], hash[2], shard}, int(n+3)/4)[:n]
}

// save stores the shard of a chain.
func save(t testing.TB, p *dram.Pool, id pool.SpaceID, s *pool.Spec, shard uint8, h pool.Hashes) {
	t.Helper()
	b := pool.Batch{
		Space: id, Shard: shard, Epoch: p.Epoch(id), Hashes: h, Status: make([]pool.Status, h.N),
		Slots: make([]pool.Slot, h.N),
	}
	p.Reserve(&b)
	arena, _ := p.Arena()
	for i := range b.Slots {
		if b.Status[i] != pool.OK {
			t.Fatalf("reserve of block %d: status %d", i, b.Status[i])
		}
		c := content(h.At(i), shard, b.Slots[i].Len)
		copy(arena[b.Slots[i].Off:], c)
		k := pool.Key{Space: s.Fingerprint, Shard: shard, Hash: pool.MakeHash(h.At(i))}
		b.Slots[i].Sum = pool.Sum(k.Seed(b.Slots[i].Len), c)
	}
	p.Commit(b.Slots, b.Epoch, b.Status)
}

// load compares every byte of a chain.
func load(t testing.TB, p *dram.Pool, id pool.SpaceID, s *pool.Spec, shard uint8, h pool.Hashes) {
	t.Helper()
	b := pool.Batch{Space: id, Shard: shard, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
	p.Acquire(&b)
	arena, _ := p.Arena()
	for i, slot := range b.Slots {
		if b.Status[i] != pool.OK {
			t.Fatalf("block %d: status %d", i, b.Status[i])
		}
		got := arena[slot.Off:][:slot.Len]
		k := pool.Key{Space: s.Fingerprint, Shard: shard, Hash: pool.MakeHash(h.At(i))}
		if !bytes.Equal(got, content(h.At(i), shard, slot.Len)) || pool.Sum(k.Seed(slot.Len), got) != slot.Sum {
			t.Fatalf("block %d: wrong bytes", i)
		}
	}
	p.Release(b.Slots, b.Status)
}

func TestReopenedPoolHasItsBlocks(t *testing.T) {
	path := keptPath(t)
	o := dram.Options{Bytes: 1 << 20, SlabBytes: 64 << 10}
	one, two := spec("one", 1000), spec("two", 3000, 5000)
	h, g := chainOf(1, 200), chainOf(2, 20)
	for process := range 4 {
		p := openFile(t, path, o)
		r := p.Info().Recovery
		if process == 0 && (!r.New || r.Entries != 0) || process > 0 &&
			(r.New || r.Cold != "" || r.Entries != 220 || r.Spaces != 2 || r.Damaged != 0) {
			t.Fatalf("process %d: %+v", process, r)
		}
		a, err := p.OpenSpace(one)
		if err != nil {
			t.Fatal(err)
		}
		b, err := p.OpenSpace(two)
		if err != nil {
			t.Fatal(err)
		}
		if process == 0 {
			save(t, p, a, &one, 0, h)
			save(t, p, b, &two, 0, g)
			save(t, p, b, &two, 1, g)
		}
		if err := p.Check(); err != nil {
			t.Fatal(err)
		}
		if n := p.Prefix(a, 0, h); n != 200 {
			t.Fatalf("process %d: %d of 200 blocks", process, n)
		}
		if n := p.Prefix(b, 0, g); n != 20 {
			t.Fatalf("process %d: %d of 20 blocks", process, n)
		}
		load(t, p, a, &one, 0, h)
		load(t, p, b, &two, 0, g)
		load(t, p, b, &two, 1, g)
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReopenedPoolHasManyShards keeps entries of up to MaxShards shards, and drops those that lack
// one.
func TestReopenedPoolHasManyShards(t *testing.T) {
	path := keptPath(t)
	o := dram.Options{Bytes: 4 << 20, SlabBytes: 64 << 10}
	sizes := slices.Repeat([]uint32{700, 1500}, pool.MaxShards/2)
	narrow, wide, widest := spec("narrow", sizes[:16]...), spec("wide", sizes[:17]...), spec("widest", sizes...)
	specs := []*pool.Spec{&narrow, &wide, &widest}
	for run := range 3 {
		p := openFile(t, path, o)
		if r := p.Info().Recovery; run > 0 && (r.Cold != "" || r.Entries != 9 || r.Spaces != 3 || r.Damaged != 0) ||
			run == 1 && r.Partial != 3 {
			t.Fatalf("run %d: %+v", run, r)
		}
		for i, s := range specs {
			id, err := p.OpenSpace(*s)
			if err != nil {
				t.Fatal(err)
			}
			h, part := chainOf(uint64(i), 3), chainOf(uint64(10+i), 1)
			for shard := range s.Shards {
				if run == 0 {
					save(t, p, id, s, uint8(shard), h)
					if shard != s.Shards/2 {
						save(t, p, id, s, uint8(shard), part)
					}
				}
			}
			if n := p.Prefix(id, 0, h); n != 3 {
				t.Fatalf("run %d: %d of 3 blocks of %d shards", run, n, s.Shards)
			}
			for shard := range s.Shards {
				load(t, p, id, s, uint8(shard), h)
			}
		}
		if err := p.Check(); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
