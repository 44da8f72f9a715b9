package tier

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// BenchmarkLookup looks up 1,000 stored blocks and an unknown prompt, in memory alone and with a
// local tier.
func BenchmarkLookup(b *testing.B) {
	d, err := dram.Open(dram.Options{Bytes: 64 << 20})
	check(b, err)
	defer d.Close()
	p, err := Open(d, []Tier{{Name: "disk", Store: pooltest.NewShelf(), Local: true}}, Options{})
	check(b, err)
	defer p.Close()
	spec := specOf("model", 1)
	id, err := p.OpenSpace(spec)
	check(b, err)
	h := chain("a", 1000)
	batch := &pool.Batch{Space: id, Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N),
		Slots: make([]pool.Slot, h.N)}
	d.Reserve(batch)
	d.Commit(batch.Slots, 1, batch.Status)
	unknown := chain("b", 1000)
	for name, ix := range map[string]pool.Index{"memory": d, "stack": p} {
		b.Run("hit/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if ix.Prefix(id, 0, h) != h.N {
					b.Fatal("not all there")
				}
			}
		})
		b.Run("miss/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if ix.Prefix(id, 0, unknown) != 0 {
					b.Fatal("found")
				}
			}
		})
	}
}

// BenchmarkCopyOut copies blocks of 64 KiB from memory to staging, as each write to a tier does,
// and verifies their checksums.
func BenchmarkCopyOut(b *testing.B) {
	const blocks, size = 256, 64 << 10
	d, err := dram.Open(dram.Options{Bytes: blocks * size, HugePages: dram.Off})
	check(b, err)
	defer func() { check(b, d.Close()) }()
	p, err := Open(d, []Tier{{Name: "disk", Store: pooltest.NewShelf(), Local: true, Write: Never}}, Options{})
	check(b, err)
	defer func() { check(b, p.Close()) }()
	spec := specOf("model", 1)
	spec.Groups[0].ShardBytes[0] = size
	n := &node{Pool: p, t: b, spec: spec}
	n.space, err = p.OpenSpace(spec)
	check(b, err)
	h := chain("a", blocks)
	n.save(h)
	sp := p.spaces.get(n.space)
	b.SetBytes(size)
	for i := 0; b.Loop(); i++ {
		o := origin{key: entryKey{space: n.space, hash: pool.MakeHash(h.At(i % blocks))}, sp: sp, era: sp.now.Load()}
		e := outgoing{origin: o}
		if !p.copyOut(&e) {
			b.Fatal("not copied")
		}
		p.returnLoans(e.loan)
	}
}
