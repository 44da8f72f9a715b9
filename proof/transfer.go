package proof

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/transfer"
)

// transferBlock is the size of a saved or loaded block, bytes: some layers of 16 tokens of a
// large model, and more than any fragment.
const transferBlock = 2 << 20

// transferSlab is the size of the pool's slabs, bytes.
const transferSlab = 16 * transferBlock

// checkTransfer measures an agent's saves and loads from the job to its completion, against copies
// in one piece: the pool, transfer's threads, and a mover.
func checkTransfer(b *bench) {
	var raw map[string]float64
	var gpu cudaipc.UUID
	b.part(func() { raw, gpu = b.raw() })
	f := b.line.Figures
	f["raw_d2h_gib_s"], f["raw_h2d_gib_s"], f["raw_both_gib_s"] = raw["save"]/gib, raw["load"]/gib, raw["both"]/gib
	b.line.say("raw D2H %.1f, H2D %.1f, both %.1f GiB/s", raw["save"]/gib, raw["load"]/gib, raw["both"]/gib)
	p := b.newPath(gpu)
	for i := range fragments {
		b.measureTransfer(p, i, raw)
	}
}

// raw measures copies of a region in one piece, bytes per second by way: what all others are held
// against.
func (b *bench) raw() (rates map[string]float64, gpu cudaipc.UUID) {
	n := b.sizes.region
	f, d := b.gpu(max(n, devicetest.MinArena), "")
	c := devicetest.Start(b, f, devicetest.Spec{Regions: []int64{2 * n}})
	save, load := b.scattered(cudaipc.Gather, n), b.scattered(cudaipc.Scatter, n)
	rates = map[string]float64{"save": b.rate(c, save), "load": b.rate(c, load), "both": b.rate(c, save, load)}
	return rates, d.Info().GPU
}

// measureTransfer measures blocks of fragments of one length with both kinds of integrity. The
// aims are for saves and loads one at a time.
func (b *bench) measureTransfer(p *path, which int, raw map[string]float64) {
	fragment := &fragments[which]
	var rates [2]map[string]float64 // by Integrity
	for _, integrity := range []transfer.Integrity{transfer.Header, transfer.Full} {
		rates[integrity] = b.measure(p, fragment.bytes, integrity, 0)
	}
	if fragment.bytes == checkedFragment {
		b.measureChecked(p, which, rates[transfer.Full])
	}
	for _, way := range []string{"save", "load", "both"} {
		rate, full := rates[transfer.Header][way], rates[transfer.Full][way]
		name := fragment.name + "_" + way
		f := b.line.Figures
		f[name+"_gib_s"], f[name+"_of_raw"], f[name+"_full_gib_s"], f[name+"_full_of_header"] = rate/gib, rate/raw[way],
			full/gib, full/rate
		if way == "both" {
			continue
		}
		b.line.say("%s %s %.1f (%.0f %%), with checksums %.1f", fragment.name, way, rate/gib, 100*rate/raw[way],
			full/gib)
		if fragment.share > 0 {
			b.line.aim(name+" of raw", rate/raw[way], fragment.share, false)
			b.line.aim(name+" with checksums of that without", full/rate, checksumShare, false)
		}
		if fragment.rate > 0 {
			b.line.aim(name+" GiB/s", rate/gib, fragment.rate/gib, false)
		}
	}
}

// checksumShare is the least share of the rate that --integrity full must keep.
const checksumShare = 0.95

// checkedFragment is the length of fragments at which the end-to-end check is measured.
const checkedFragment = 64 << 10

// measureChecked measures saves and loads with every block checked end to end, as serve does with
// --verify-sample 1. With 1,000 a block costs a thousandth of the difference.
func (b *bench) measureChecked(p *path, which int, full map[string]float64) {
	checked := b.measure(p, fragments[which].bytes, transfer.Full, 1)
	for _, way := range []string{"save", "load"} {
		name, f := fragments[which].name+"_"+way, b.line.Figures
		f[name+"_checked_gib_s"], f[name+"_checked_of_full"] = checked[way]/gib, checked[way]/full[way]
		f[name+"_check_us_per_block"] = transferBlock * (1/checked[way] - 1/full[way]) * 1e6
		b.line.say("%s %s with every block checked end to end %.1f GiB/s, %.0f us a block", fragments[which].name, way,
			checked[way]/gib, f[name+"_check_us_per_block"])
	}
}

// path is an agent's data path from an engine's memory to the pool.
type path struct {
	pool   *dram.Pool
	peer   cudaipc.Peer
	blocks int // of one job
}

// newPath returns the path of an engine on a GPU, with the pool pinned.
func (b *bench) newPath(gpu cudaipc.UUID) *path {
	p := &path{blocks: int(b.sizes.region / transferBlock)}
	var err error
	// Room for two jobs: the blocks that are loaded are those of the save before.
	p.pool, err = dram.Open(dram.Options{Bytes: 2*b.sizes.region + 4*transferSlab, SlabBytes: transferSlab})
	b.must(err)
	b.closes(p.pool.Close)
	arena, fd := p.pool.Arena()
	o, informed := b.informed()
	o.ArenaFD, o.ArenaSize = fd, int64(len(arena))
	m, err := mover.New(o.ForGPU(gpu))
	b.must(err)
	b.closes(m.Close)
	e := devicetest.CUDAEngine(b, devicetest.Spec{Regions: []int64{2 * b.sizes.region}}, cudaipc.KindCUDA)
	im, err := e.Import()
	b.must(err)
	p.peer = devicetest.Import(b, m, im)
	informed()
	return p
}

// measure returns the rates of saves, of loads, and of a save beside a load, bytes per second:
// the median of the rounds. The blocks are made of separate fragments.
func (b *bench) measure(p *path, fragment int64, integrity transfer.Integrity, every uint32) map[string]float64 {
	done := make(chan transfer.Completion, 2)
	cfg := p.config(fragment, integrity, done)
	cfg.Sampling.Every = every
	cfg.Sampling.Arena, _ = p.pool.Arena()
	cfg.Limits = transfer.DefaultLimits
	cfg.Limits.SampleWait = cudaipc.MaxSampleWait
	var err error
	cfg.Space, err = p.pool.OpenSpace(cfg.Spec)
	b.must(err)
	w, err := transfer.Start(cfg)
	b.must(err)
	defer w.Close()
	took := map[string][]time.Duration{}
	for range b.sizes.rounds {
		epoch, err := p.pool.ResetSpace(cfg.Space) // saved blocks are to be saved again
		b.must(err)
		p.pool.Sweep()
		first, second := p.job(transfer.Save, 0, epoch), p.job(transfer.Save, p.blocks, epoch)
		load := p.job(transfer.Load, 0, epoch)
		for _, m := range []struct {
			way  string
			jobs []transfer.Job
		}{{"save", []transfer.Job{first}}, {"load", []transfer.Job{load}}, {"both", []transfer.Job{second, load}}} {
			took[m.way] = append(took[m.way], b.timed(w, m.jobs, done))
		}
	}
	bytes := float64(p.blocks) * transferBlock
	return map[string]float64{
		"save": bytes / median(took["save"]).Seconds(),
		"load": bytes / median(took["load"]).Seconds(),
		"both": 2 * bytes / median(took["both"]).Seconds(),
	}
}

// config returns the options of a worker whose blocks are made of every second fragment of the
// engine's region.
func (p *path) config(fragment int64, integrity transfer.Integrity, done chan<- transfer.Completion) transfer.Config {
	g := transfer.GroupLayout{NumBlocks: uint32(p.blocks)}
	for at := int64(0); at < transferBlock; at += fragment {
		g.Segments = append(g.Segments, transfer.Segment{
			Region: 1,
			Offset: uint64(2 * at),
			Stride: 2 * transferBlock,
			Bytes:  uint32(fragment),
		})
	}
	return transfer.Config{
		Peer: p.peer, Slots: p.pool,
		Held:      []transfer.Held{{Layout: transfer.Layout{Groups: []transfer.GroupLayout{g}}}},
		Integrity: integrity,
		Lanes:     transfer.NewLanes(64, transfer.DefaultLimits.SaveAge, nil),
		Complete:  func(c transfer.Completion) { done <- c },
		Spec: pool.Spec{
			Fingerprint: pool.Fingerprint{1},
			Identity:    []byte("proof"),
			Shards:      1,
			Groups:      []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{transferBlock}}},
		},
	}
}

// job returns a job over all of the engine's blocks, under hashes from first on.
func (p *path) job(kind transfer.Kind, first int, epoch uint32) transfer.Job {
	const length = 32
	s := transfer.Section{}
	blob := make([]byte, p.blocks*length)
	for i := range p.blocks {
		binary.LittleEndian.PutUint64(blob[i*length:], uint64(first+i)+1)
		s.Blocks = append(s.Blocks, uint32(i))
	}
	s.Hashes = pool.Chain(blob, length)
	return transfer.Job{
		ID:       uint64(kind) + 1,
		Kind:     kind,
		Epoch:    epoch,
		Event:    cudaipc.None,
		Revoke:   cudaipc.None,
		Sections: []transfer.Section{s},
	}
}

// timed submits jobs and returns the time until all of them have ended. Every block must succeed.
func (b *bench) timed(w *transfer.Worker, jobs []transfer.Job, done <-chan transfer.Completion) time.Duration {
	begin := time.Now()
	for _, j := range jobs {
		b.must(w.Submit(j))
	}
	for range jobs {
		select {
		case c := <-done:
			if i := slices.IndexFunc(c.Status, func(s pool.Status) bool { return s != pool.OK }); i >= 0 {
				b.Fatalf("block %d has status %d", i, c.Status[i])
			}
			if c.Sample.Unverified > 0 {
				b.Fatalf("%d blocks were not checked in time", c.Sample.Unverified)
			}
		case <-time.After(devicetest.WaitLimit):
			b.Fatalf("a job did not end within %v", devicetest.WaitLimit)
		}
	}
	return time.Since(begin)
}
