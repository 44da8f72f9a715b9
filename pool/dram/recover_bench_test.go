package dram

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// BenchmarkSave reserves and commits chains in a full pool, without the bytes: the file adds its
// headers.
func BenchmarkSave(b *testing.B) {
	for _, kept := range []bool{false, true} {
		name, o := "memory", Options{Bytes: 256 << 20, SlabBytes: 1 << 20}
		if kept {
			dir, err := os.MkdirTemp("/dev/shm", "kvagent-bench-")
			if err != nil {
				b.Skip(err)
			}
			defer os.RemoveAll(dir)
			name, o.Path = "file", filepath.Join(dir, "pool")
		}
		b.Run(name, func(b *testing.B) {
			p, err := Open(o)
			if err != nil {
				b.Fatal(err)
			}
			defer p.Close()
			if err := p.Populated(); err != nil {
				b.Fatal(err)
			}
			if _, err := p.OpenSpace(keptSpec); err != nil {
				b.Fatal(err)
			}
			number := 0
			save := func() {
				h := randomChain(nil, number, benchChainLen)
				number++
				batch := pool.Batch{
					Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
				}
				p.Reserve(&batch)
				p.Commit(batch.Slots, 1, batch.Status)
			}
			for number < 2*(256<<10)/benchChainLen {
				save()
			}
			report := reportCPU(b, benchChainLen)
			for b.Loop() {
				save()
			}
			report()
		})
	}
}
