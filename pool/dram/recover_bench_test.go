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

// BenchmarkRecover opens the file of a full pool as a kill leaves it.
func BenchmarkRecover(b *testing.B) {
	const slots = 256 << 10
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-bench-")
	if err != nil {
		b.Skip(err)
	}
	defer os.RemoveAll(dir)
	o := Options{Bytes: slots << 10, SlabBytes: 1 << 20, Path: filepath.Join(dir, "pool")}
	p, err := Open(o)
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	if _, err := p.OpenSpace(keptSpec); err != nil {
		b.Fatal(err)
	}
	for number := range slots / benchChainLen {
		h := randomChain(nil, number, benchChainLen)
		batch := pool.Batch{Epoch: 1, Hashes: h, Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N)}
		p.Reserve(&batch)
		p.Commit(batch.Slots, 1, batch.Status)
	}
	killed, err := os.ReadFile(o.Path)
	if err != nil {
		b.Fatal(err)
	}
	o.Path = filepath.Join(dir, "killed")
	for b.Loop() {
		b.StopTimer()
		if err := os.WriteFile(o.Path, killed, 0o600); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		next, err := Open(o)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if r := next.Info().Recovery; r.Cold != "" || r.Entries < slots*95/100 {
			b.Fatalf("%+v of %d slots", r, slots)
		}
		if err := next.Close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/slots, "ns/slot")
}
