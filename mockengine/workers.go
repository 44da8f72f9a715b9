package mockengine

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/engine"
)

// Workers are all ranks of an engine: their memory and their streams.
type Workers struct {
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

// NewWorkers returns the ranks of a validated configuration.
func NewWorkers(cfg *Config) (*Workers, error) {
	w := &Workers{cfg: cfg}
	for g := range cfg.Groups {
		s, err := newShape(cfg.blockTokens(g), cfg.BlockBytes/layers)
		if err != nil {
			return nil, err
		}
		w.shapes = append(w.shapes, s)
	}
	for i := range cfg.Ranks {
		r, err := newRank(cfg, i)
		if err != nil {
			w.Close()
			return nil, fmt.Errorf("rank %d: %w", i, err)
		}
		w.ranks = append(w.ranks, r)
	}
	return w, nil
}

func newRank(cfg *Config, number int) (*rank, error) {
	half := int64(cfg.BlockBytes) / 2 * int64(cfg.Blocks+1)
	d, err := openDevice(cfg, []int64{half, half})
	if err != nil {
		return nil, err
	}
	r := &rank{device: d, rng: rand.New(rand.NewPCG(cfg.Seed, uint64(number)))}
	for region := range d.memory {
		r.layOut(cfg, region)
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

// layOut places half of the layers of every block, including the null block, in a region.
func (r *rank) layOut(cfg *Config, region int) {
	size, blocks := cfg.BlockBytes/layers, cfg.Blocks+1
	for l := range layers / 2 {
		offset, stride := l*size*blocks, size
		if region == 0 {
			offset, stride = l*size, layers/2*size
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
func (w *Workers) event(step uint64) uint32 { return uint32(step % workerEvents) }

// launch starts a step on all ranks: its kernels, then the step word, then the event. It does not
// wait.
func (w *Workers) launch(k *work) {
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
func (w *Workers) wrong(group uint8, id BlockID, bases []uint64) (n int) {
	for _, r := range w.ranks {
		for s := range r.segments {
			n += r.segments[s].wrong(id, bases, r.salts[group][s])
		}
	}
	return n
}

func (w *Workers) revoke(i uint32) {
	for _, r := range w.ranks {
		r.Revoke(i)
	}
}

func (w *Workers) clearRevoke(i uint32) {
	for _, r := range w.ranks {
		r.ClearRevoke(i)
	}
}

// Close ends the streams and frees the memory, which nothing may use any more.
func (w *Workers) Close() {
	for _, r := range w.ranks {
		r.Close()
	}
}

// Where a worker's memory is (Config.Device).
const (
	DeviceHost    = "host"         // shared memory
	DeviceCUDA    = "cuda"         // one allocation on the only GPU that the process sees
	DeviceVirtual = "cuda-virtual" // the same in pieces of virtual memory, like PyTorch's expandable segments
)

// virtualPiece is the size of the pieces of virtual memory, bytes: the granularity of all GPUs so
// far.
const virtualPiece = 2 << 20

// exporter is a worker's words and events, as other processes import them: engine.Host or
// engine.CUDA.
type exporter interface {
	SyncDesc() (cudaipc.Region, cudaipc.Sync)
	Step() uint64
	Revoke(word uint32)
	ClearRevoke(word uint32)
	Close() error
}

// stream runs a worker's steps, one launch after the other.
type stream interface {
	Launch(kernel func())
	SetStep(step uint64)
	Record(event uint32)
}

// stretch is a region of a worker's memory.
type stretch interface {
	io.ReaderAt
	io.WriterAt
	Regions() []cudaipc.Region
}

// device is the device of a rank.
type device struct {
	exporter
	stream stream
	memory []stretch    // one for each size asked for; their ids are 1 and up
	gpu    cudaipc.UUID // zero on the host
}

// openDevice opens the device that cfg names, with a region of each size.
func openDevice(cfg *Config, sizes []int64) (d *device, err error) {
	if cfg.Device == DeviceHost {
		d, err = openHost(sizes)
	} else {
		d, err = openCUDA(cfg, sizes)
	}
	if err != nil && d != nil {
		err = errors.Join(err, d.Close())
	}
	return d, err
}

func openHost(sizes []int64) (*device, error) {
	e, err := engine.NewHost(workerEvents, revokeWords)
	if err != nil {
		return nil, err
	}
	d := &device{exporter: e}
	for i, size := range sizes {
		m, err := e.Alloc(cudaipc.RegionID(i+1), size)
		if err != nil {
			return d, err
		}
		d.memory = append(d.memory, m)
	}
	d.stream = e.NewStream()
	return d, nil
}

func openCUDA(cfg *Config, sizes []int64) (*device, error) {
	e, err := engine.NewCUDA(cudaipc.UUID{}, workerEvents, revokeWords)
	if err != nil {
		return nil, err
	}
	d := &device{exporter: e, gpu: e.GPU()}
	list, err := allocate(e, sizes, cfg.Device == DeviceVirtual)
	if err != nil {
		return d, err
	}
	for _, m := range list {
		d.memory = append(d.memory, m)
	}
	d.stream = e.NewStream()
	return d, nil
}

// allocate puts all regions into one allocation, so that they lie at offsets in it, or each into
// pieces of its own.
func allocate(e *engine.CUDA, sizes []int64, virtual bool) (list []*engine.CUDAMemory, err error) {
	ids := make([]cudaipc.RegionID, len(sizes))
	for i := range sizes {
		ids[i] = cudaipc.RegionID(i + 1)
	}
	if !virtual {
		return e.AllocTogether(ids, sizes)
	}
	for i, size := range sizes {
		m, err := e.AllocVirtual(ids[i], size, virtualPiece)
		if err != nil {
			return nil, err
		}
		list = append(list, m)
	}
	return list, nil
}

// segment is one piece of every block: block b's is the bytes at offset + b*stride of a region.
type segment struct {
	region         cudaipc.RegionID
	mem            []byte  // the region, where the CPU can touch it; else nil
	far            stretch // the region
	offset, stride int
	bytes          int
}

func newSegment(id cudaipc.RegionID, far stretch, offset, stride, size int) segment {
	s := segment{region: id, far: far, offset: offset, stride: stride, bytes: size}
	if m, ok := far.(*engine.HostMemory); ok {
		s.mem = m.Mem
	}
	return s
}

// at returns the offset of a block's piece in its region.
func (s *segment) at(id BlockID) int { return s.offset + int(id)*s.stride }

// of returns a block's piece in place, or room for a copy of it.
func (s *segment) of(id BlockID) []byte {
	if s.mem == nil {
		return make([]byte, s.bytes)
	}
	at := s.at(id)
	return s.mem[at : at+s.bytes : at+s.bytes]
}

// fill writes the words of bases to a block's piece, from the word first on.
func (s *segment) fill(id BlockID, first int, bases []uint64, salt uint64) {
	mem := s.of(id)[first*wordBytes:][:len(bases)*wordBytes]
	fill(mem, bases, salt)
	if s.mem == nil {
		_, err := s.far.WriteAt(mem, int64(s.at(id)+first*wordBytes))
		s.must("write", id, err)
	}
}

// wrong counts the bytes of a block's piece that are not what fill would have written from word 0
// on.
func (s *segment) wrong(id BlockID, bases []uint64, salt uint64) int {
	mem := s.of(id)[:len(bases)*wordBytes]
	if s.mem == nil {
		_, err := s.far.ReadAt(mem, int64(s.at(id)))
		s.must("read", id, err)
	}
	return wrong(mem, bases, salt)
}

// must panics if the process's own memory fails, as an engine does whose kernel fails.
func (s *segment) must(what string, id BlockID, err error) {
	if err != nil {
		panic(fmt.Sprintf("%s of block %d in region %d: %v", what, id, s.region, err))
	}
}
