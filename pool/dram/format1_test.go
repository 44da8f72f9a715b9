package dram

import (
	"encoding/binary"
	"hash/crc32"
	"os"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// writeFormat1 writes a file in format 1 from its description alone: n blocks of keptSpec in the first slab, of which block i
// holds its hash. It shares no code with what reads it but the places of the areas.
func writeFormat1(t *testing.T, path string, l *layout, h pool.Hashes) {
	t.Helper()
	b := make([]byte, l.end)
	u16, u32, u64 := binary.LittleEndian.PutUint16, binary.LittleEndian.PutUint32, binary.LittleEndian.PutUint64
	table := crc32.MakeTable(crc32.Castagnoli)

	s := b[l.end-4096:]
	copy(s, "kvagdram")
	u32(s[8:], 1)
	for i, n := range []int64{l.arena, l.slab, l.page, l.headers, l.learned, l.spaces, l.slabs} {
		u64(s[32+8*i:], uint64(n))
	}
	for i := range 5 {
		u64(s[104+8*i:], uint64(i)*2+1)
	}
	u32(s[12:], crc32.Update(crc32.Checksum(s[:12], table), table, s[16:144]))
	u64(s[536:], uint64(4096)) // headers with memory
	u64(s[544:], 1)            // spaces

	r := b[l.spaces:]
	u64(r[8:], 5) // generation
	p := append(append([]byte(nil), keptSpec.Fingerprint[:]...), 1, 0, 0, 0, 1, 0, 0, 0, 16, 0, 0, 0, 0, 4, 0, 0)
	p = append(p, keptSpec.Identity...)
	copy(r[16:], p)
	u32(r[0:], crc32.Checksum(p, table))
	u32(r[4:], uint32(len(p)))

	u64(b[l.slabs:], slabWord(0, 1024))
	for i := range h.N {
		copy(b[i*1024:], h.At(i))
		e := b[l.headers+int64(i)*64:]
		copy(e, h.At(i))
		u16(e[32:], 0)
		e[34], e[35] = 0, 32
		u32(e[36:], 5)
		u32(e[40:], 1024)
		k := pool.Key{Space: keptSpec.Fingerprint, Hash: pool.MakeHash(h.At(i))}
		u32(e[44:], pool.Sum(k.Seed(1024), b[i*1024:][:1024]))
		u32(e[60:], crc32.Checksum(e[:48], table))
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestFormat1IsRead(t *testing.T) {
	o := Options{Bytes: 64 << 10, SlabBytes: 16 << 10, Path: shmPath(t)}
	l := layoutOf(o.Bytes, o.SlabBytes, pageBytes)
	h := randomChain(nil, 1, 12)
	writeFormat1(t, o.Path, &l, h)
	// Half of the headers were converted when the process was killed.
	changeFile(t, o, func(b []byte, l *layout) {
		for i := range uint32(6) {
			e := headersIn(b[l.headers:], 12)
			if !convertFirst(&e[i], i) {
				t.Fatal("not a header of format 1")
			}
		}
	})
	for life := range 2 {
		p := reopen(t, o)
		if r := p.Info().Recovery; r.Format != uint32(life+1) || r.Cold != "" || r.Entries != 12 || r.Damaged != 0 {
			t.Fatalf("life %d: %+v", life, r)
		}
		id := openSpec(t, p, keptSpec)
		items := make([]pool.Item, h.N)
		for i := range items {
			items[i] = pool.Item{Key: pool.Key{Space: keptSpec.Fingerprint, Hash: pool.MakeHash(h.At(i))}, Data: make([]byte, 1024)}
		}
		if err := pooltest.NewStore(t, p, keptSpec).Get(t.Context(), items); err != nil {
			t.Fatal(err)
		}
		for i := range items {
			if items[i].Status != pool.OK || string(items[i].Data[:32]) != string(h.At(i)) {
				t.Fatalf("life %d, block %d: status %d", life, i, items[i].Status)
			}
		}
		if n := p.Prefix(id, 0, h); n != 12 {
			t.Errorf("%d of 12 blocks", n)
		}
		closePool(t, p)
	}
}
