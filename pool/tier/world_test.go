package tier

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience   = 20 * time.Second
	shardBytes = 1000
)

// node is a stack over a memory of its own, and the steps that tests are told in.
type node struct {
	*Pool
	t     testing.TB
	mem   *dram.Pool
	space pool.SpaceID
	spec  pool.Spec
}

func specOf(name string, shards int) pool.Spec {
	s := pool.Spec{Identity: []byte(name), Shards: shards}
	sum := sha256.Sum256(s.Identity)
	copy(s.Fingerprint[:], sum[:])
	g := pool.Group{BlockTokens: 16}
	for range shards {
		g.ShardBytes = append(g.ShardBytes, shardBytes)
	}
	s.Groups = []pool.Group{g, g}
	return s
}

// openMemory opens a memory that holds so many blocks of one shard.
func openMemory(t testing.TB, blocks int) *dram.Pool {
	t.Helper()
	m, err := dram.Open(dram.Options{Bytes: int64(blocks) << 10, SlabBytes: dram.MinSlabBytes, HugePages: dram.Off})
	check(t, err)
	return m
}

// newNode opens a stack whose memory holds so many blocks of one shard.
func newNode(t testing.TB, blocks, shards int, o Options, tiers ...Tier) *node {
	t.Helper()
	m := openMemory(t, blocks)
	if o.PrefetchBytes == 0 {
		o.PrefetchBytes = max(int64(blocks)<<10/2, 64<<10)
		o.PrefetchBytes = min(o.PrefetchBytes, m.Stats().Capacity)
	}
	if o.Log == nil {
		o.Log = func(tier, what string, err error) { t.Logf("tier %q: %s: %v", tier, what, err) }
	}
	return openNode(t, m, m, shards, o, tiers)
}

// openNode opens a stack over a memory that m is part of.
func openNode(t testing.TB, m *dram.Pool, memory pool.Memory, shards int, o Options, tiers []Tier) *node {
	t.Helper()
	var err error
	if o.Staging == nil {
		o.Staging, err = transit.OpenStaging(16 << 20)
		check(t, err)
	}
	p, err := Open(memory, tiers, o)
	check(t, err)
	n := &node{Pool: p, t: t, mem: m, spec: specOf("model", shards)}
	n.space, err = p.OpenSpace(n.spec)
	check(t, err)
	t.Cleanup(func() {
		if err := p.Close(); err != nil && !errors.Is(err, pool.ErrClosed) {
			t.Error(err)
		}
		n.nothingLeft()
		check(t, o.Staging.Close())
		check(t, m.Close())
	})
	return n
}

// nothingLeft checks what must be true when no ref is held.
func (n *node) nothingLeft() {
	n.t.Helper()
	if s := n.mem.Stats(); s.Pinned != 0 || s.Partial != 0 {
		n.t.Errorf("%d bytes are pinned, %d entries partial", s.Pinned, s.Partial)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.mu.open)+len(n.mu.byID) != 0 || n.mu.bytes != 0 || len(n.mu.writing) != 0 {
		n.t.Errorf("left: %d open promises, %d by number, %d bytes, %d reservations", len(n.mu.open), len(n.mu.byID),
			n.mu.bytes, len(n.mu.writing))
	}
	if n.o.Staging.Lent() != 0 {
		n.t.Errorf("%d bytes of staging are lent", n.o.Staging.Lent())
	}
}

// hangingFile is a file of a catalog on a disk that does not answer before works is closed.
type hangingFile struct {
	catalog.File
	works chan struct{}
}

func (f *hangingFile) Write(k *catalog.Catalog) error {
	<-f.works
	return f.File.Write(k)
}

// moodyFile is a file of a catalog that may fail to be written.
type moodyFile struct {
	catalog.File
	fails atomic.Bool
}

func (f *moodyFile) Write(k *catalog.Catalog) error {
	if f.fails.Load() {
		return errMoody
	}
	return f.File.Write(k)
}

// givenFile gives a node a catalog to begin with.
type givenFile struct{ k *catalog.Catalog }

func (f givenFile) Read() (*catalog.Catalog, error) { return f.k, nil }
func (f givenFile) Write(*catalog.Catalog) error    { return nil }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// chain is n hashes that belong to a name; the first m of a longer one are the same.
func chain(name string, n int) pool.Hashes {
	var blob []byte
	for i := range n {
		sum := sha256.Sum256(binary.LittleEndian.AppendUint32([]byte(name), uint32(i)))
		blob = append(blob, sum[:]...)
	}
	return pool.Chain(blob, 32)
}

// content is what is stored under a key.
func content(k *pool.Key, p []byte) {
	seed := k.Seed(uint32(len(p)))
	for i := range p {
		seed = seed*1664525 + 1013904223
		p[i] = byte(seed >> 24)
	}
}

func (n *node) batch(h pool.Hashes, shard int) *pool.Batch {
	return &pool.Batch{
		Space: n.space, Shard: uint8(shard), Epoch: n.Epoch(n.space), Hashes: h, Status: make([]pool.Status, h.N),
		Slots: make([]pool.Slot, h.N),
	}
}

func (n *node) key(b *pool.Batch, i int) pool.Key {
	return pool.Key{Space: n.spec.Fingerprint, Group: b.Group, Shard: b.Shard, Hash: pool.MakeHash(b.Hashes.At(i))}
}

// save stores all shards of a chain, as far as there is room.
func (n *node) save(h pool.Hashes) {
	n.t.Helper()
	for shard := range n.spec.Shards {
		b := n.batch(h, shard)
		n.Reserve(b)
		for i := range b.Status {
			if b.Status[i] == pool.OK {
				key, s := n.key(b, i), &b.Slots[i]
				p := n.arena[s.Off : s.Off+int64(s.Len)]
				content(&key, p)
				s.Sum = pool.Sum(key.Seed(s.Len), p)
			}
		}
		n.Commit(b.Slots, b.Epoch, b.Status)
	}
}

// load reads all shards of a chain from memory, compares every byte, and gives how many blocks were
// there.
func (n *node) load(h pool.Hashes) (there int) {
	n.t.Helper()
	there = h.N
	for shard := range n.spec.Shards {
		b := n.batch(h, shard)
		n.Acquire(b)
		ok := 0
		for i := range b.Status {
			if b.Status[i] != pool.OK {
				continue
			}
			ok++
			key, s := n.key(b, i), &b.Slots[i]
			want := make([]byte, s.Len)
			content(&key, want)
			if string(n.arena[s.Off:s.Off+int64(s.Len)]) != string(want) {
				n.t.Errorf("WRONG BYTES under hash %d", i)
			}
		}
		there = min(there, ok)
		n.Release(b.Slots, b.Status)
	}
	return there
}

// flush pushes everything out of memory that is not held.
func (n *node) flush() {
	n.t.Helper()
	capacity := int(n.mem.Stats().Capacity >> 10)
	b := n.batch(chain("flush", capacity), 0)
	n.mem.Reserve(b)
	for i := range b.Status {
		if b.Status[i] == pool.OK {
			b.Status[i] = pool.Busy
		}
	}
	n.mem.Commit(b.Slots, b.Epoch, b.Status)
}

func (n *node) ask(h pool.Hashes, within time.Duration) (pending bool) {
	return n.Ask(n.space, []pool.Asked{{Hashes: h}}, time.Now().Add(within), false)
}

// know asks until all answers are known, and gives the prefix.
func (n *node) know(h pool.Hashes) int {
	n.t.Helper()
	end := time.Now().Add(patience)
	for n.ask(h, time.Second) {
		if time.Now().After(end) {
			n.t.Fatal("pending for ever")
		}
	}
	return n.Prefix(n.space, 0, h)
}

// settled pins a chain, waits for what was promised, and gives the refs.
func (n *node) settled(h pool.Hashes) (count int, refs []pool.Ref) {
	n.t.Helper()
	count, refs, _ = n.Pin(n.space, 0, h, 1<<40, nil)
	n.settle(refs)
	return count, refs
}

// whenSettled calls then when no promise is open, at once if none is.
func (n *node) whenSettled(refs []pool.Ref, then func()) {
	if n.Settle(refs, then) == nil {
		then()
	}
}

func (n *node) settle(refs []pool.Ref) {
	n.t.Helper()
	done := make(chan struct{})
	n.whenSettled(refs, func() { close(done) })
	select {
	case <-done:
	case <-time.After(patience):
		n.t.Fatalf("never settled: %+v", n.Report())
	}
}

// waitFor waits until something holds.
func (n *node) waitFor(what string, holds func(r *pool.TierReport) bool) {
	n.t.Helper()
	end := time.After(patience)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		r := n.Report()
		if holds(&r) {
			return
		}
		select {
		case <-tick.C:
		case <-end:
			n.t.Fatalf("never: %s; %+v", what, r)
		}
	}
}

// stored waits until a tier has written so many entries.
func (n *node) stored(tier int, entries uint64) {
	n.t.Helper()
	n.waitFor("written to the tier",
		func(r *pool.TierReport) bool { return r.Tiers[tier].Stored+r.Tiers[tier].Had >= entries })
}

// StoredAs returns the present name of a space in the tiers.
func (n *node) StoredAs(fp pool.Fingerprint) pool.Fingerprint {
	return catalog.StoredName(fp, n.names.Epoch(fp))
}
