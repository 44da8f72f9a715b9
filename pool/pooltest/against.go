package pooltest

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

const againstSteps = 3000

// TestAgainst applies the same random operations to a pool and to a slow, simple one, both large
// enough that nothing need be evicted, and compares every answer.
func TestAgainst(t *testing.T, open, oracle Open) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	o := Options{Bytes: 16 << 20, SlabBytes: 64 << 10}
	spec := model("two", 2, 1000, 1500)
	p := &pair{r: rand.New(rand.NewPCG(seed, 0)), a: start(t, open, o, spec), b: start(t, oracle, o, spec), t: t}
	for i := range againstSteps {
		p.step()
		if i%100 == 0 {
			p.a.check()
		}
	}
	for len(p.held) > 0 {
		p.end()
	}
	for i := range p.pins {
		p.a.Unpin(p.pins[i][0])
		p.b.Unpin(p.pins[i][1])
	}
	p.stats()
	p.a.empty()
	p.b.empty()
}

// pair is two pools that get the same operations.
type pair struct {
	t    *testing.T
	r    *rand.Rand
	a, b *fixture
	held [][2]*pool.Batch // reserved if Parent is not nil, else acquired
	pins [][2][]pool.Ref
}

func (p *pair) step() {
	h, group, shard := fork(p.r), uint8(p.r.IntN(2)), uint8(p.r.IntN(2))
	part := h.Slice(p.r.IntN(h.N), h.N)
	switch n := p.r.IntN(100); {
	case n < 30:
		p.batch(part, group, shard, func(f *fixture, b *pool.Batch) {
			b.Parent = []byte{0}
			f.Reserve(b)
			f.write(b)
		})
	case n < 50:
		p.batch(part, group, shard, func(f *fixture, b *pool.Batch) { f.Acquire(b) })
	case n < 80 && len(p.held) > 0:
		p.end()
	case n < 90:
		p.look(h, part, group)
	case n < 95 && len(p.pins) > 0:
		p.a.Unpin(p.pins[0][0])
		p.b.Unpin(p.pins[0][1])
		p.pins = p.pins[1:]
	case n < 98:
		p.delete(part, group, shard)
	case n == 99 && p.r.IntN(4) == 0:
		e, _ := p.a.ResetSpace(p.a.space)
		if want, _ := p.b.ResetSpace(p.b.space); e != want {
			p.t.Fatalf("epoch %d, want %d", e, want)
		}
	}
	p.stats()
}

func (p *pair) batch(h pool.Hashes, group, shard uint8, do func(*fixture, *pool.Batch)) {
	var both [2]*pool.Batch
	for i, f := range []*fixture{p.a, p.b} {
		both[i] = f.batch(h, shard, nil)
		both[i].Group = group
		do(f, both[i])
	}
	p.same(both, "reserve or acquire")
	p.held = append(p.held, both)
}

func (p *pair) same(both [2]*pool.Batch, what string) {
	p.t.Helper()
	if !slices.Equal(both[0].Status, both[1].Status) {
		p.t.Fatalf("%s: statuses\n%v, want\n%v", what, both[0].Status, both[1].Status)
	}
	for i := range both[0].Slots {
		a, b := both[0].Slots[i], both[1].Slots[i]
		if a.Len != b.Len || a.Sum != b.Sum || a.Shard != b.Shard || (a.Ref == 0) != (b.Ref == 0) {
			p.t.Fatalf("%s: slot %+v, want like %+v", what, a, b)
		}
	}
}

func (p *pair) end() {
	i := p.r.IntN(len(p.held))
	both := p.held[i]
	p.held = slices.Delete(p.held, i, i+1)
	seed := p.r.Uint64()
	for i, f := range []*fixture{p.a, p.b} {
		b, r := both[i], rand.New(rand.NewPCG(seed, 0))
		f.verify(b)
		for j := range b.Status {
			if b.Status[j] == pool.OK && r.IntN(10) == 0 {
				b.Status[j] = pool.Corrupt
			}
		}
		if b.Parent != nil {
			f.Commit(b.Slots, b.Epoch, b.Status)
		} else {
			f.Release(b.Slots, b.Status)
		}
	}
	p.same(both, "commit or release")
}

func (p *pair) look(h, part pool.Hashes, group uint8) {
	if a, b := p.a.Prefix(p.a.space, group, h), p.b.Prefix(p.b.space, group, h); a != b {
		p.t.Fatalf("prefix %d, want %d", a, b)
	}
	there, want := make([]bool, part.N), make([]bool, part.N)
	p.a.Exists(p.a.space, group, part, there)
	p.b.Exists(p.b.space, group, part, want)
	if !slices.Equal(there, want) {
		p.t.Fatalf("exists %v, want %v", there, want)
	}
	limit := int64(p.r.IntN(64 << 10))
	n, refs, bytes := p.a.Pin(p.a.space, group, part, limit, nil)
	m, others, sum := p.b.Pin(p.b.space, group, part, limit, nil)
	if n != m || bytes != sum || len(refs) != n {
		p.t.Fatalf("pin %d, %d bytes, %d refs; want %d, %d", n, bytes, len(refs), m, sum)
	}
	p.pins = append(p.pins, [2][]pool.Ref{refs, others})
}

func (p *pair) delete(h pool.Hashes, group, shard uint8) {
	b := &pool.Batch{Group: group, Shard: shard, Hashes: h}
	keys := []pool.Key{p.a.key(b, 0)}
	if err := NewStore(p.t, p.a, p.a.spec).Delete(p.t.Context(), keys); err != nil {
		p.t.Fatal(err)
	}
	if err := NewStore(p.t, p.b, p.b.spec).Delete(p.t.Context(), keys); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pair) stats() {
	p.t.Helper()
	a, b := p.a.Stats(), p.b.Stats()
	if a.Used != b.Used || a.Pinned != b.Pinned || a.Entries != b.Entries || a.Partial != b.Partial ||
		a.PinnedEntries != b.PinnedEntries || a.Dropped != b.Dropped || a.Busy != b.Busy {
		p.t.Fatalf("stats %+v,\nwant like %+v", a, b)
	}
}
