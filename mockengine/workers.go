package mockengine

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// workers is all ranks of an engine: their memory and their streams.
type workers struct {
	cfg    *Config
	shapes []shape // per group
	ranks  []*rank
}

// rank is one worker: a shard of every block. In its first region half of the layers lie block by
// block, so that the pieces of a block are adjacent; in its second the other half layer by layer,
// so that they are not.
type rank struct {
	*device
	segments []segment
	salts    [][]uint64 // by group and segment
	rng      *rand.Rand // of the stream's goroutine
}

func newWorkers(cfg *Config) (*workers, error) {
	w := &workers{cfg: cfg}
	for _, scale := range cfg.Groups {
		s, err := newShape(scale*cfg.BlockTokens, cfg.BlockBytes/cfg.Layers)
		if err != nil {
			return nil, err
		}
		w.shapes = append(w.shapes, s)
	}
	for i := range cfg.Ranks {
		r, err := newRank(cfg, i)
		if err != nil {
			w.close()
			return nil, fmt.Errorf("rank %d: %w", i, err)
		}
		w.ranks = append(w.ranks, r)
	}
	return w, nil
}

func newRank(cfg *Config, number int) (*rank, error) {
	near := (cfg.Layers + 1) / 2
	layers := []int{near, cfg.Layers - near}[:min(cfg.Layers, 2)]
	var sizes []int64
	for _, n := range layers {
		sizes = append(sizes, int64(n)*int64(cfg.BlockBytes/cfg.Layers)*int64(cfg.Blocks+1))
	}
	d, err := openDevice(cfg, sizes)
	if err != nil {
		return nil, err
	}
	r := &rank{device: d, rng: rand.New(rand.NewPCG(cfg.Seed, uint64(number)))}
	for i, n := range layers {
		r.layOut(cfg, i, n)
	}
	for g := range cfg.Groups {
		var salts []uint64
		for s := range r.segments {
			salts = append(salts, salt(g, s, number))
		}
		r.salts = append(r.salts, salts)
	}
	return r, nil
}

// layOut places that many layers of every block, including the null block, in a region.
func (r *rank) layOut(cfg *Config, region, layers int) {
	size, blocks := cfg.BlockBytes/cfg.Layers, cfg.Blocks+1
	for l := range layers {
		offset, stride := l*size*blocks, size
		if region == 0 {
			offset, stride = l*size, layers*size
		}
		r.segments = append(r.segments, newSegment(cudaipc.RegionID(region+1), r.memory[region], offset, stride, size))
	}
}

// work is what one step writes: pieces of blocks, as words that start at word at.
type work struct {
	step   uint64
	pieces []piece
	bases  []uint64
	done   sync.WaitGroup // the step's kernels on all ranks
	hold   chan struct{}  // not nil: kernels stop half way until it is closed
}

type piece struct {
	group    uint8
	block    BlockID
	at       int // first word
	from, to int // its bases
}

// event returns the event that is recorded after a step.
func (w *workers) event(step uint64) uint32 { return uint32(step % uint64(w.cfg.Events)) }

// launch starts a step on all ranks: its kernels, then the step word, then the event. It does not
// wait.
func (w *workers) launch(k *work) {
	k.done.Add(len(w.ranks))
	for _, r := range w.ranks {
		r.stream.Launch(func() { r.run(k, w.cfg.KernelLag) })
		r.stream.SetStep(k.step)
		r.stream.Record(w.event(k.step))
		r.stream.Launch(k.done.Done)
	}
}

func (r *rank) run(k *work, lag time.Duration) {
	if lag > 0 && len(k.pieces) > 0 {
		time.Sleep(time.Duration(r.rng.Int64N(int64(lag))))
	}
	for i := range k.pieces {
		if k.hold != nil && i == len(k.pieces)/2 {
			<-k.hold
		}
		p := &k.pieces[i]
		for s := range r.segments {
			r.segments[s].fill(p.block, p.at, k.bases[p.from:p.to], r.salts[p.group][s])
		}
	}
}

// wrong counts the bytes of a block, over all ranks, that differ from what the bases determine from
// word 0 on.
func (w *workers) wrong(group uint8, id BlockID, bases []uint64) (n int) {
	for _, r := range w.ranks {
		for s := range r.segments {
			n += r.segments[s].wrong(id, bases, r.salts[group][s])
		}
	}
	return n
}

func (w *workers) revoke(i uint32) {
	for _, r := range w.ranks {
		r.Revoke(i)
	}
}

func (w *workers) clearRevoke(i uint32) {
	for _, r := range w.ranks {
		r.ClearRevoke(i)
	}
}

// close ends the streams and frees the memory, which nothing may use any more.
func (w *workers) close() {
	for _, r := range w.ranks {
		r.Close()
	}
}
