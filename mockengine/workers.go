package mockengine

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// Regions of a worker. The first half of the layers lies block by block, so that the pieces of a block are
// neighbours; the other half layer by layer, so that they are not.
const (
	regionBlocks cudaipc.RegionID = 1
	regionLayers cudaipc.RegionID = 2
)

// workers is all ranks of an engine: their memory and their streams.
type workers struct {
	cfg    *Config
	shapes []shape // per group
	ranks  []*rank
}

// rank is one worker: a shard of every block.
type rank struct {
	host     *cudaipc.HostEngine
	stream   *cudaipc.HostStream
	memory   []*cudaipc.HostMemory
	segments []segment
	salts    [][]uint64 // by group and segment
	rng      *rand.Rand // of the stream's goroutine
}

// segment is one piece of every block: block b's is the bytes at offset + b*stride of mem.
type segment struct {
	region         cudaipc.RegionID
	mem            []byte
	offset, stride int
	bytes          int
}

func (s *segment) of(id BlockID) []byte {
	o := s.offset + int(id)*s.stride
	return s.mem[o : o+s.bytes : o+s.bytes]
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
	host, err := cudaipc.NewHostEngine(uint32(cfg.Events), uint32(cfg.Revokes))
	if err != nil {
		return nil, err
	}
	r := &rank{host: host, rng: rand.New(rand.NewPCG(cfg.Seed, uint64(number)))}
	near := (cfg.Layers + 1) / 2
	if err = r.layOut(cfg, regionBlocks, near, true); err == nil && cfg.Layers > near {
		err = r.layOut(cfg, regionLayers, cfg.Layers-near, false)
	}
	if err != nil {
		host.Close()
		return nil, err
	}
	for g := range cfg.Groups {
		var salts []uint64
		for s := range r.segments {
			salts = append(salts, salt(g, s, number))
		}
		r.salts = append(r.salts, salts)
	}
	r.stream = host.NewStream()
	return r, nil
}

// layOut makes a region with that many layers of every block, the null block too.
func (r *rank) layOut(cfg *Config, id cudaipc.RegionID, layers int, blockOuter bool) error {
	size, blocks := cfg.BlockBytes/cfg.Layers, cfg.Blocks+1
	m, err := r.host.Alloc(id, int64(size)*int64(layers)*int64(blocks))
	if err != nil {
		return err
	}
	r.memory = append(r.memory, m)
	for l := range layers {
		s := segment{region: id, mem: m.Mem, offset: l * size * blocks, stride: size, bytes: size}
		if blockOuter {
			s.offset, s.stride = l*size, layers*size
		}
		r.segments = append(r.segments, s)
	}
	return nil
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

// event is the event that is recorded behind a step.
func (w *workers) event(step uint64) uint32 { return uint32(step % uint64(w.cfg.Events)) }

// launch starts a step on all ranks: its kernels, then the step word, then the event. It does not wait.
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
			mem := r.segments[s].of(p.block)
			fill(mem[p.at*wordBytes:], k.bases[p.from:p.to], r.salts[p.group][s])
		}
	}
}

// wrong counts the bytes of a block, over all ranks, that are not what the bases say from word 0 on.
func (w *workers) wrong(group uint8, id BlockID, bases []uint64) (n int) {
	for _, r := range w.ranks {
		for s := range r.segments {
			n += wrong(r.segments[s].of(id), bases, r.salts[group][s])
		}
	}
	return n
}

func (w *workers) revoke(i uint32) {
	for _, r := range w.ranks {
		r.host.Revoke(i)
	}
}

func (w *workers) clearRevoke(i uint32) {
	for _, r := range w.ranks {
		r.host.ClearRevoke(i)
	}
}

// close ends the streams and frees the memory. Nobody may reach it any more.
func (w *workers) close() {
	for _, r := range w.ranks {
		r.host.Close()
	}
}
