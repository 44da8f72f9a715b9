package transfer

import (
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// BenchmarkStaged loads 64 MiB of 32 layers, layer-outermost, whole and by stages: milliseconds
// until the first layer and until all have arrived, and what the sums before the first copy take.
func BenchmarkStaged(b *testing.B) {
	const layers, perLayer, count = 32, 64 << 10, 32 // blocks of 2 MiB
	const block = layers * perLayer
	p, err := dram.Open(dram.Options{Bytes: 2 * count * block})
	if err != nil {
		b.Fatal(err)
	}
	arena, _ := p.Arena()
	device := host.Open(arena)
	e, err := engine.NewHost(1, 1)
	if err != nil {
		b.Fatal(err)
	}
	cache, err := e.Alloc(1, 2*count*block)
	if err != nil {
		b.Fatal(err)
	}
	words, sync := e.SyncDesc()
	im := cudaipc.Import{Sync: &sync}
	for _, r := range []cudaipc.Region{words, cache.Region()} {
		if r, err = r.Dup(); err != nil {
			b.Fatal(err)
		}
		im.Regions = append(im.Regions, r)
	}
	peer, err := device.Import(im)
	if err != nil {
		b.Fatal(err)
	}
	g := GroupLayout{NumBlocks: 2 * count}
	order := make([]uint16, layers)
	for i := range order {
		order[i] = uint16(i)
		g.Segments = append(g.Segments, Segment{Region: 1, Offset: uint64(i) * 2 * count * perLayer, Stride: perLayer,
			Bytes: perLayer})
	}
	shard := Held{0, Layout{[]GroupLayout{g}}}
	stages, err := MakeStages([]Held{shard}, order)
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan Completion, 1)
	cfg := Config{
		Peer: peer, Slots: p, Held: []Held{{Layout: shard.Layout}},
		Lanes: NewLanes(4, DefaultLimits.SaveAge, nil),
		Spec: pool.Spec{Fingerprint: pool.Fingerprint{3}, Identity: []byte("bench"), Shards: 1,
			Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{block}}}},
		Sampling: Sampling{Arena: arena}, Complete: func(c Completion) { done <- c },
	}
	if cfg.Space, err = p.OpenSpace(cfg.Spec); err != nil {
		b.Fatal(err)
	}
	w, err := Start(cfg)
	if err != nil {
		b.Fatal(err)
	}
	finish := func(j Job) {
		if err := w.Submit(j); err != nil {
			b.Fatal(err)
		}
		for i, s := range (<-done).Status {
			if s != pool.OK {
				b.Fatalf("block %d has status %d", i, s)
			}
		}
	}
	finish(save(1, section(0, count, 0)))
	finish(load(2, section(0, count, count)))
	var whole, first, all, sums time.Duration
	word := e.StageWord(0)
	b.SetBytes(2 * count * block)
	for b.Loop() {
		begin := time.Now()
		finish(load(3, section(0, count, count)))
		whole += time.Since(begin)
		j := load(4, section(0, count, count))
		j.Staged = &Staged{Stages: stages, Word: e.StageWords()}
		atomic.StoreUint64(word, 0)
		begin = time.Now()
		if err := w.Submit(j); err != nil {
			b.Fatal(err)
		}
		for atomic.LoadUint64(word) == 0 {
			runtime.Gosched()
		}
		first += time.Since(begin)
		<-done
		all += time.Since(begin)
		begin = time.Now()
		if _, err := cudaipc.SumBytes(0, arena, 0, count*block); err != nil {
			b.Fatal(err)
		}
		sums += time.Since(begin)
	}
	ms := func(d time.Duration, name string) { b.ReportMetric(d.Seconds()*1e3/float64(b.N), name) }
	ms(whole, "ms_whole")
	ms(first, "ms_first_stage")
	ms(all, "ms_all_stages")
	ms(sums, "ms_one_sum")
	w.Close()
	if err := errors.Join(peer.Close(), device.Close()); err != nil {
		b.Error(err)
	}
	if err := e.Close(); err != nil {
		b.Error(err)
	}
	_ = p.Close()
}
