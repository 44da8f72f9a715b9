package events

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// BenchmarkTell reports what a block costs whose tokens are said, that is stored, told to each of
// some sessions, and kept in the file: time, and memory while it is held.
func BenchmarkTell(b *testing.B) {
	const prompts, n, tokens, sessions = 1 << 10, 64, 16, 4
	p, err := dram.Open(dram.Options{Bytes: prompts * n << 10, SlabBytes: 64 << 10, Virtual: true})
	if err != nil {
		b.Fatal(err)
	}
	defer p.Close()
	id, err := p.OpenSpace(pool.Spec{
		Shards: 1, Groups: []pool.Group{{BlockTokens: tokens, ShardBytes: []uint32{1024}}},
	})
	if err != nil {
		b.Fatal(err)
	}
	rules := &lookup.Space{ID: id, Groups: []lookup.Group{{BlockTokens: tokens}}}
	said := &ipc.BlockTokens{HashLen: 32, Hashes: make([]byte, n*32), Tokens: make([]byte, n*tokens*4)}
	status, slots := make([]pool.Status, n), make([]pool.Slot, n)
	var memory float64
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.GC() // what finalizers held
		runtime.ReadMemStats(&before)
		folder := filepath.Join(b.TempDir(), "tokens")
		d := New(p, nil, folder, zap.NewNop())
		told := 0
		ask := func(session uint64) {
			for whole := false; !whole; {
				answered := false
				d.Serve(session, rules, &ipc.NextEvents{Blocks: 256}, 0, func(m any) {
					one := m.(*ipc.BlockEvents)
					for i := range one.Runs {
						told += len(one.Runs[i].Hashes) / 32
					}
					answered, whole = true, one.State == ipc.EventsWhole
				})
				if !answered {
					return
				}
			}
		}
		begun := make(chan any, 1)
		d.Serve(0, rules, &ipc.NextEvents{Blocks: 1}, 0, func(m any) { begun <- m })
		<-begun
		d.Leave(0)
		for session := range uint64(sessions) {
			ask(session)
		}
		for i := range prompts {
			for k := range n {
				binary.LittleEndian.PutUint32(said.Hashes[k*32:], uint32(i*n+k))
			}
			d.Serve(1, rules, said, 0, nil)
			batch := pool.Batch{
				Space: id, Epoch: p.Epoch(id), Hashes: pool.Chain(said.Hashes, 32), Status: status, Slots: slots,
			}
			p.Reserve(&batch)
			p.Commit(batch.Slots, batch.Epoch, batch.Status)
			d.Serve(1, rules, said, 0, nil) // looks them up, as the note does a moment later
			for session := range uint64(sessions) {
				ask(session)
			}
		}
		if told < prompts*n*sessions*9/10 {
			b.Fatalf("%d blocks are told", told)
		}
		runtime.GC()
		runtime.GC() // what finalizers held
		runtime.ReadMemStats(&after)
		memory = float64(after.HeapAlloc-before.HeapAlloc) / (prompts * n)
		b.ReportMetric(float64(d.Report().Bytes)/(prompts*n), "counted-bytes/block")
		d.Close()
		kept := int64(0)
		files, err := os.ReadDir(folder)
		if err != nil {
			b.Fatal(err)
		}
		for _, one := range files {
			if info, err := one.Info(); err == nil {
				kept += info.Size()
			}
		}
		b.ReportMetric(float64(kept)/(prompts*n), "file-bytes/block")
		if _, err := p.ResetSpace(id); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(memory, "heap-bytes/block")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(prompts*n), "ns/block")
}
