package pooltest

import (
	"crypto/sha256"
	"encoding/binary"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

const hashLen = 32

// fixture is a pool with one open space, and the steps of the tests.
type fixture struct {
	Pool
	t     testing.TB
	spec  pool.Spec
	space pool.SpaceID
	arena []byte
}

// small has four slabs of 16 KiB.
var small = Options{Bytes: 64 << 10, SlabBytes: 16 << 10}

func start(t testing.TB, open Open, o Options, spec pool.Spec) *fixture {
	t.Helper()
	p := open(t, o)
	f := &fixture{Pool: p, t: t}
	f.arena, _ = p.Arena()
	f.space, f.spec = f.open(spec), spec
	t.Cleanup(func() {
		f.check()
		if err := p.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return f
}

// with returns the same pool with another space.
func (f *fixture) with(spec pool.Spec) *fixture {
	f.t.Helper()
	return &fixture{Pool: f.Pool, t: f.t, spec: spec, space: f.open(spec), arena: f.arena}
}

func (f *fixture) open(spec pool.Spec) pool.SpaceID {
	f.t.Helper()
	id, err := f.OpenSpace(spec)
	if err != nil {
		f.t.Fatalf("open space: %v", err)
	}
	return id
}

func (f *fixture) check() {
	f.t.Helper()
	if p, ok := f.Pool.(interface{ Check() error }); ok {
		if err := p.Check(); err != nil {
			f.t.Fatalf("the pool's own check: %v", err)
		}
	}
}

// model returns a spec whose groups all have the given shards.
func model(name string, groups int, shardBytes ...uint32) pool.Spec {
	s := pool.Spec{Identity: []byte(name), Shards: len(shardBytes)}
	sum := sha256.Sum256(s.Identity)
	copy(s.Fingerprint[:], sum[:])
	for range groups {
		s.Groups = append(s.Groups, pool.Group{BlockTokens: 16, ShardBytes: shardBytes})
	}
	return s
}

// chain returns n hashes that belong to a name; the first m of a longer one are the same.
func chain(name string, n int) pool.Hashes {
	blob := make([]byte, 0, n*hashLen)
	for i := range n {
		sum := sha256.Sum256(binary.LittleEndian.AppendUint32([]byte(name), uint32(i)))
		blob = append(blob, sum[:]...)
	}
	return pool.Chain(blob, hashLen)
}

func (f *fixture) batch(h pool.Hashes, shard uint8, parent []byte) *pool.Batch {
	return &pool.Batch{
		Space: f.space, Shard: shard, Epoch: f.Epoch(f.space), Parent: parent, Hashes: h,
		Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
}

// key returns the key of hash i of a batch.
func (f *fixture) key(b *pool.Batch, i int) pool.Key {
	return pool.Key{Space: f.spec.Fingerprint, Group: b.Group, Shard: b.Shard, Hash: pool.MakeHash(b.Hashes.At(i))}
}

// write fills the reserved slots with bytes that follow from their keys.
func (f *fixture) write(b *pool.Batch) {
	for i := range b.Status {
		if b.Status[i] == pool.OK {
			key, s := f.key(b, i), &b.Slots[i]
			p := f.arena[s.Off : s.Off+int64(s.Len)]
			content(&key, p)
			s.Sum = pool.Sum(key.Seed(s.Len), p)
		}
	}
}

// content fills p with what is stored under a key.
func content(k *pool.Key, p []byte) {
	seed := k.Seed(uint32(len(p)))
	for i := range p {
		seed = seed*1664525 + 1013904223
		p[i] = byte(seed >> 24)
	}
}

// verify compares acquired slots with the content of their keys.
func (f *fixture) verify(b *pool.Batch) {
	f.t.Helper()
	for i := range b.Status {
		if b.Status[i] != pool.OK {
			continue
		}
		key, s := f.key(b, i), &b.Slots[i]
		want := make([]byte, s.Len)
		content(&key, want)
		if got := f.arena[s.Off : s.Off+int64(s.Len)]; string(got) != string(want) {
			f.t.Fatalf("wrong bytes under hash %d of the chain", i)
		}
		if s.Sum != pool.Sum(key.Seed(s.Len), want) {
			f.t.Fatalf("wrong checksum with hash %d of the chain", i)
		}
	}
}

// save stores one shard of a chain after parent, and returns the batch.
func (f *fixture) save(h pool.Hashes, shard uint8, parent []byte) *pool.Batch {
	f.t.Helper()
	b := f.batch(h, shard, parent)
	f.Reserve(b)
	f.write(b)
	f.Commit(b.Slots, b.Epoch, b.Status)
	return b
}

// store saves all shards of a chain, which must all find room.
func (f *fixture) store(h pool.Hashes, parent []byte) {
	f.t.Helper()
	for shard := range f.spec.Shards {
		b := f.save(h, uint8(shard), parent)
		for i, s := range b.Status {
			if s != pool.OK {
				f.t.Fatalf("saving hash %d of shard %d: status %d, want OK", i, shard, s)
			}
		}
	}
}

func (f *fixture) present(h pool.Hashes) []bool {
	out := make([]bool, h.N)
	f.Exists(f.space, 0, h, out)
	return out
}

func (f *fixture) count(h pool.Hashes) (n int) {
	for _, p := range f.present(h) {
		if p {
			n++
		}
	}
	return n
}

func (f *fixture) wantPrefix(h pool.Hashes, n int, why string) {
	f.t.Helper()
	if got := f.Prefix(f.space, 0, h); got != n {
		f.t.Fatalf("%s: prefix of %d hashes is %d, want %d", why, h.N, got, n)
	}
}

func (f *fixture) wantStatus(b *pool.Batch, want pool.Status, why string) {
	f.t.Helper()
	for i, s := range b.Status {
		if s != want {
			f.t.Fatalf("%s: hash %d has status %d, want %d", why, i, s, want)
		}
	}
}

// ResetSpace resets a space and sweeps its memory.
func (f *fixture) ResetSpace(s pool.SpaceID) (uint32, error) {
	epoch, err := f.Pool.ResetSpace(s)
	f.Sweep()
	return epoch, err
}

// empty resets the space, and checks that all memory is free.
func (f *fixture) empty() {
	f.t.Helper()
	if _, err := f.ResetSpace(f.space); err != nil {
		f.t.Fatal(err)
	}
	f.check()
	if s := f.Stats(); s.Used != 0 || s.Pinned != 0 || s.Entries != 0 || s.Partial != 0 || s.PinnedEntries != 0 {
		f.t.Fatalf("everything was dropped and released, and yet: %+v", s)
	}
}
