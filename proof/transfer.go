package proof

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
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

// checkTransfer measures an agent's saves and loads from the job to its completion, against
// single pinned copies: the pool, transfer's threads, and a mover.
func checkTransfer(b *bench) (err error) {
	raw, gpu, err := b.measureRaw()
	if err != nil {
		return err
	}
	p, err := b.newPath(gpu)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	e, err := b.engine(false, 2*b.sizes.region)
	if err != nil {
		return err
	}
	im, err := e.describe(1)
	if err != nil {
		return err
	}
	if err := p.mover.Import(im); err != nil {
		return err
	}
	if err := p.pinned(); err != nil {
		return err
	}
	for i := range fragments {
		if err := b.measureTransfer(p, i, raw); err != nil {
			return fmt.Errorf("%s: %w", fragments[i].name, err)
		}
	}
	return nil
}

// measureRaw measures single copies before there is a mover, and returns the GPU.
func (b *bench) measureRaw() (*cuda.RawCopies, cudaipc.UUID, error) {
	a, err := newArena(1<<20, false)
	if err != nil {
		return nil, cudaipc.UUID{}, err
	}
	defer a.close()
	d, err := cuda.Open(cuda.Options{Arena: a.mem})
	if err != nil {
		return nil, cudaipc.UUID{}, err
	}
	raw, err := d.Raw(b.sizes.raw, b.sizes.rounds)
	f := b.line.Figures
	f["raw_d2h_gib_s"], f["raw_h2d_gib_s"], f["raw_both_gib_s"] = raw.ToHost/gib, raw.ToGPU/gib, raw.Both/gib
	b.line.say("raw D2H %.1f, H2D %.1f, both %.1f GiB/s", raw.ToHost/gib, raw.ToGPU/gib, raw.Both/gib)
	return &raw, d.Info().GPU, errors.Join(err, d.Close(cudaipc.AllPeers))
}

// measureTransfer measures blocks of fragments of one length with both kinds of integrity. The
// aims are for saves and loads one at a time.
func (b *bench) measureTransfer(p *path, which int, raw *cuda.RawCopies) error {
	fragment := &fragments[which]
	var rates [2]map[string]float64 // by Integrity
	for _, integrity := range []transfer.Integrity{transfer.Header, transfer.Full} {
		var err error
		if rates[integrity], err = p.measure(fragment.bytes, integrity, 0); err != nil {
			return err
		}
	}
	if fragment.bytes == checkedFragment {
		if err := b.measureChecked(p, which, rates[transfer.Full]); err != nil {
			return err
		}
	}
	for _, way := range []string{"save", "load", "both"} {
		rate, full := rates[transfer.Header][way], rates[transfer.Full][way]
		of := map[string]float64{"save": raw.ToHost, "load": raw.ToGPU, "both": raw.Both}[way]
		name := fragment.name + "_" + way
		f := b.line.Figures
		f[name+"_gib_s"], f[name+"_of_raw"], f[name+"_full_gib_s"], f[name+"_full_of_header"] = rate/gib, rate/of,
			full/gib, full/rate
		if way == "both" {
			continue
		}
		b.line.say("%s %s %.1f (%.0f %%), with checksums %.1f", fragment.name, way, rate/gib, 100*rate/of, full/gib)
		if fragment.share > 0 {
			b.line.aim(name+" of raw", rate/of, fragment.share, false)
			b.line.aim(name+" with checksums of that without", full/rate, checksumShare, false)
		}
		if fragment.rate > 0 {
			b.line.aim(name+" GiB/s", rate/gib, fragment.rate/gib, false)
		}
	}
	return nil
}

// checkedFragment is the length of fragments at which the end-to-end check is measured.
const checkedFragment = 64 << 10

// measureChecked measures saves and loads with every block checked end to end, as serve does with
// --verify-sample 1. With 1,000 a block costs a thousandth of the difference.
func (b *bench) measureChecked(p *path, which int, full map[string]float64) error {
	checked, err := p.measure(fragments[which].bytes, transfer.Full, 1)
	if err != nil {
		return err
	}
	for _, way := range []string{"save", "load"} {
		name, f := fragments[which].name+"_"+way, b.line.Figures
		f[name+"_checked_gib_s"], f[name+"_checked_of_full"] = checked[way]/gib, checked[way]/full[way]
		f[name+"_check_us_per_block"] = transferBlock * (1/checked[way] - 1/full[way]) * 1e6
		b.line.say("%s %s with every block checked end to end %.1f GiB/s, %.0f us a block", fragments[which].name, way,
			checked[way]/gib, f[name+"_check_us_per_block"])
	}
	return nil
}

// path is an agent's data path from an engine's memory to the pool.
type path struct {
	pool   *dram.Pool
	mover  *mover.Mover
	info   atomic.Pointer[cudaipc.CUDAInfo] // nil: not received yet
	blocks int                              // of one job
	rounds int
}

func (b *bench) newPath(gpu cudaipc.UUID) (*path, error) {
	p := &path{blocks: int(b.sizes.region / transferBlock), rounds: b.sizes.rounds}
	var err error
	// Room for two jobs: the blocks that are loaded are those of the save before.
	if p.pool, err = dram.Open(dram.Options{
		Bytes:     2*b.sizes.region + 4*transferSlab,
		SlabBytes: transferSlab,
	}); err != nil {
		return nil, err
	}
	arena, fd := p.pool.Arena()
	o := mover.Options{
		ArenaFD:   fd,
		ArenaSize: int64(len(arena)),
		Informed:  func(i cudaipc.CUDAInfo) { p.info.Store(&i) },
	}
	if p.mover, err = mover.New(o.ForGPU(gpu)); err != nil {
		return nil, errors.Join(err, p.pool.Close())
	}
	return p, nil
}

func (p *path) close() error { return errors.Join(p.mover.Close(cudaipc.AllPeers), p.pool.Close()) }

// pinned waits until the pool is pinned.
func (p *path) pinned() error {
	for begin := time.Now(); time.Since(begin) < answerWithin; time.Sleep(lookEvery) {
		if i := p.info.Load(); i != nil && i.PinError != "" {
			return fmt.Errorf("the driver pinned %d of %d bytes: %s", i.Pinned, i.Arena, i.PinError)
		} else if i != nil && i.PinDone {
			return nil
		}
	}
	return fmt.Errorf("the pool was not pinned within %v", answerWithin)
}

// measure returns the rates of saves, of loads, and of a save beside a load, bytes per second:
// the median of the rounds. The blocks are made of separate fragments.
func (p *path) measure(fragment int64, integrity transfer.Integrity, every uint32) (map[string]float64, error) {
	done := make(chan transfer.Completion, 2)
	cfg, err := p.config(fragment, integrity, done)
	if err != nil {
		return nil, err
	}
	cfg.Sampling.Every = every
	cfg.Sampling.Arena, _ = p.pool.Arena()
	cfg.Limits = transfer.DefaultLimits
	cfg.Limits.SampleWait = cudaipc.MaxSampleWait
	w, err := transfer.Start(cfg)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	took := map[string][]time.Duration{}
	for range p.rounds {
		epoch, err := p.pool.ResetSpace(cfg.Space) // saved blocks are to be saved again
		if err != nil {
			return nil, err
		}
		p.pool.Sweep()
		first, second := p.job(transfer.Save, 0, epoch), p.job(transfer.Save, p.blocks, epoch)
		load := p.job(transfer.Load, 0, epoch)
		for _, m := range []struct {
			way  string
			jobs []transfer.Job
		}{{"save", []transfer.Job{first}}, {"load", []transfer.Job{load}}, {"both", []transfer.Job{second, load}}} {
			d, err := timed(w, m.jobs, done)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", m.way, err)
			}
			took[m.way] = append(took[m.way], d)
		}
	}
	rates := map[string]float64{}
	for way, list := range took {
		slices.Sort(list)
		bytes := float64(p.blocks) * transferBlock
		if way == "both" {
			bytes *= 2
		}
		rates[way] = bytes / list[len(list)/2].Seconds()
	}
	return rates, nil
}

// config returns the options of a worker whose blocks are made of every second fragment of the
// engine's region.
func (p *path) config(fragment int64, integrity transfer.Integrity, done chan<- transfer.Completion) (transfer.Config,
	error) {
	g := transfer.GroupLayout{NumBlocks: uint32(p.blocks)}
	for at := int64(0); at < transferBlock; at += fragment {
		g.Segments = append(g.Segments, transfer.Segment{
			Region: 1,
			Offset: uint64(2 * at),
			Stride: 2 * transferBlock,
			Bytes:  uint32(fragment),
		})
	}
	cfg := transfer.Config{
		Device: p.mover, Peer: 1, Slots: p.pool, Layout: transfer.Layout{Groups: []transfer.GroupLayout{g}},
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
	var err error
	cfg.Space, err = p.pool.OpenSpace(cfg.Spec)
	return cfg, err
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

// timed submits jobs and waits for all of them. Every block must succeed.
func timed(w *transfer.Worker, jobs []transfer.Job, done <-chan transfer.Completion) (time.Duration, error) {
	begin := time.Now()
	for _, j := range jobs {
		if err := w.Submit(j); err != nil {
			return 0, err
		}
	}
	for range jobs {
		select {
		case c := <-done:
			for i, s := range c.Status {
				if s != pool.OK {
					return 0, fmt.Errorf("block %d has status %d", i, s)
				}
			}
			if c.Sample.Unverified > 0 {
				return 0, fmt.Errorf("%d blocks were not checked in time", c.Sample.Unverified)
			}
		case <-time.After(answerWithin):
			return 0, fmt.Errorf("a job did not end within %v", answerWithin)
		}
	}
	return time.Since(begin), nil
}
