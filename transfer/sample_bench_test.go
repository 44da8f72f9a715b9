package transfer

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// Shape of what is measured: blocks of 2 MiB in fragments of 64 KiB that lie apart, as layers do.
const (
	benchBlock    = 2 << 20
	benchFragment = 64 << 10
	benchBlocks   = 32 // of one job
)

// BenchmarkSampling saves and loads without a check, with one block in 1,000 checked, and with all,
// one after the other in each round: figures are blocks/s, their shares of those without a check in
// the same run, and this process's processor time in times of that without.
func BenchmarkSampling(b *testing.B) {
	for _, name := range []string{"host", "mover"} {
		b.Run(name, func(b *testing.B) { benchSampling(b, sampledDevices[name]) })
	}
}

func benchSampling(b *testing.B, open openSampled) {
	p, err := dram.Open(dram.Options{Bytes: 2 * benchBlocks * benchBlock})
	if err != nil {
		b.Fatal(err)
	}
	arena, fd := p.Arena()
	device, err := open.device(fd, int64(len(arena)))
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := device.Close(); err != nil {
			b.Error(err)
		}
		_ = p.Close()
	}()
	engine := open.engine(b, devicetest.Spec{Regions: []int64{2 * benchBlocks * benchBlock}})
	im, err := engine.Import()
	if err != nil {
		b.Fatal(err)
	}
	peer, err := device.Import(im)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = peer.Close() }()
	g := GroupLayout{NumBlocks: benchBlocks}
	for at := uint64(0); at < benchBlock; at += benchFragment {
		g.Segments = append(g.Segments, Segment{Region: 1, Offset: 2 * at, Stride: 2 * benchBlock,
			Bytes: benchFragment})
	}
	done := make(chan Completion, 1)
	cfg := Config{
		Peer: peer, Slots: p, Held: []Held{{Layout: Layout{[]GroupLayout{g}}}}, Limits: patientSamples(),
		Lanes: NewLanes(4, DefaultLimits.SaveAge, nil),
		Spec: pool.Spec{Fingerprint: pool.Fingerprint{3}, Identity: []byte("bench"), Shards: 1,
			Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{benchBlock}}}},
		Sampling: Sampling{Arena: arena}, Complete: func(c Completion) { done <- c },
	}
	if cfg.Space, err = p.OpenSpace(cfg.Spec); err != nil {
		b.Fatal(err)
	}
	every := []uint32{0, 1000, 1}
	var workers []*Worker
	for _, n := range every {
		cfg.Sampling.Every = n
		w, err := Start(cfg)
		if err != nil {
			b.Fatal(err)
		}
		defer w.Close()
		workers = append(workers, w)
	}
	took, cpu := make([][2]time.Duration, len(every)), make([][2]time.Duration, len(every))
	round := func(i int) {
		epoch, err := p.ResetSpace(cfg.Space)
		if err != nil {
			b.Fatal(err)
		}
		p.Sweep()
		for kind, job := range []Job{save(1, section(0, benchBlocks, 0)), load(2, section(0, benchBlocks, 0))} {
			job.Epoch = epoch
			begin, used := time.Now(), processorTime(b)
			if err := workers[i].Submit(job); err != nil {
				b.Fatal(err)
			}
			for j, s := range (<-done).Status {
				if s != pool.OK {
					b.Fatalf("block %d has status %d", j, s)
				}
			}
			took[i][kind] += time.Since(begin)
			cpu[i][kind] += processorTime(b) - used
		}
	}
	for i := range every {
		round(i) // the pages come
	}
	clear(took)
	clear(cpu)
	b.SetBytes(2 * benchBlocks * benchBlock)
	for n := range b.N {
		for i := range every {
			round((n + i) % len(every)) // none always follows the same other one
		}
	}
	for i, n := range every {
		for kind, name := range []string{"save", "load"} {
			b.ReportMetric(float64(b.N)*benchBlocks/took[i][kind].Seconds(), fmt.Sprintf("%s_%d_blocks/s", name, n))
			if i > 0 {
				b.ReportMetric(took[0][kind].Seconds()/took[i][kind].Seconds(), fmt.Sprintf("%s_%d_of_off", name, n))
				b.ReportMetric(cpu[i][kind].Seconds()/cpu[0][kind].Seconds(), fmt.Sprintf("%s_%d_cpu", name, n))
			}
		}
	}
}

// processorTime returns what this process has used so far: on a machine that others use, it says
// more than the clock.
func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
