package transfer

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/cudaipc/host"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

const (
	patience  = devicetest.WaitLimit // for events that must come
	blocks    = 256                  // engine blocks of a station
	piece     = 4 << 10              // bytes of one segment
	pieces    = 4                    // segments of a block: two neighbours in each of two regions
	blockSize = piece * pieces
	hashLen   = 32
)

// node is a pool and a device that copies in and out of its arena.
type node struct {
	pool  *dram.Pool
	host  cudaipc.Device
	lanes *Lanes
}

func newNode(t *testing.T, poolBlocks int) *node {
	t.Helper()
	return newNodeOn(t, poolBlocks, openHost)
}

// openHost opens the host device on an arena, which stays mapped.
func openHost(fd int, size int64) (cudaipc.Device, error) {
	arena, err := cudaipc.MapFD(fd, size)
	if err != nil {
		return nil, err
	}
	return host.Open(arena), nil
}

// newNodeOn returns a node with the device that open makes of the pool's arena.
func newNodeOn(t *testing.T, poolBlocks int, open func(fd int, size int64) (cudaipc.Device, error)) *node {
	t.Helper()
	p, err := dram.Open(dram.Options{
		Bytes: int64(poolBlocks) * blockSize, SlabBytes: 4 * blockSize, HugePages: dram.Off,
	})
	if err != nil {
		t.Fatal(err)
	}
	arena, fd := p.Arena()
	host, err := open(fd, int64(len(arena)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := host.Close(); err != nil {
			t.Errorf("closing the device: %v", err)
		}
		if s := p.Stats(); s.PinnedEntries != 0 || s.Pinned != 0 {
			t.Errorf("%d entries, %d bytes are pinned at the end", s.PinnedEntries, s.Pinned)
		}
		if err := p.Close(); err != nil {
			t.Errorf("closing the pool: %v", err)
		}
	})
	return &node{pool: p, host: host, lanes: NewLanes(2, DefaultLimits.SaveAge, nil)}
}

// station is an engine worker in this process and the Worker that serves it.
type station struct {
	*node
	t      *testing.T
	engine *engine.Host
	mem    [2]*engine.HostMemory
	stream *engine.HostStream
	peer   cudaipc.Peer
	worker *Worker
	done   chan Completion
	space  pool.SpaceID
}

func spec(shards int) pool.Spec {
	sizes := make([]uint32, shards)
	for i := range sizes {
		sizes[i] = blockSize
	}
	return pool.Spec{
		Fingerprint: pool.Fingerprint{1, byte(shards)}, Identity: []byte("model"), Shards: shards,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: sizes}},
	}
}

// layout returns two regions, each with two layers whose pieces of a block lie side by side.
func layout() Layout {
	var g GroupLayout
	g.NumBlocks = blocks
	for r := range 2 {
		for i := range 2 {
			g.Segments = append(g.Segments,
				Segment{Region: cudaipc.RegionID(r), Offset: uint64(i) * piece, Stride: 2 * piece, Bytes: piece})
		}
	}
	return Layout{Groups: []GroupLayout{g}}
}

// join adds a station to a node; change may alter its configuration.
func (n *node) join(t *testing.T, change func(*Config)) *station {
	t.Helper()
	s := &station{node: n, t: t, done: make(chan Completion, 4096)}
	var err error
	if s.engine, err = engine.NewHost(16, 16); err != nil {
		t.Fatal(err)
	}
	s.stream = s.engine.NewStream()
	var im cudaipc.Import
	words, sync := s.engine.SyncDesc()
	im.Sync = &sync
	im.Regions = append(im.Regions, dup(t, words))
	for r := range s.mem {
		if s.mem[r], err = s.engine.Alloc(cudaipc.RegionID(r), blocks*2*piece); err != nil {
			t.Fatal(err)
		}
		im.Regions = append(im.Regions, dup(t, s.mem[r].Region()))
	}
	s.peer = devicetest.Import(t, n.host, im)
	s.start(change)
	return s
}

func (s *station) start(change func(*Config)) {
	s.t.Helper()
	cfg := Config{
		Peer: s.peer, Slots: s.pool, Spec: spec(1), Held: []Held{{Layout: layout()}}, Lanes: s.lanes,
		Complete: func(c Completion) { s.done <- c },
	}
	if change != nil {
		change(&cfg)
	}
	s.sample(&cfg)
	var err error
	if cfg.Space, err = s.pool.OpenSpace(cfg.Spec); err != nil {
		s.t.Fatal(err)
	}
	s.space = cfg.Space
	if s.worker, err = Start(cfg); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		s.worker.Close()
		if err := s.engine.Close(); err != nil {
			s.t.Error(err)
		}
	})
}

// sample has one block of each three checked, unless the test says otherwise or has wrapped the
// real peer.
func (s *station) sample(cfg *Config) {
	peer := cfg.Peer
	if gate, is := peer.(*stageGate); is {
		peer = gate.Peer
	}
	if peer != s.peer || cfg.Sampling.Every > 0 {
		return
	}
	arena, _ := s.pool.Arena()
	if slots, ok := cfg.Slots.(interface{ Arena() ([]byte, int) }); ok {
		arena, _ = slots.Arena()
	}
	cfg.Sampling = Sampling{Every: 3, Arena: arena,
		Mismatch: func(m Mismatch) { s.t.Errorf("a block does not match: %+v", m) }}
}

func dup(t *testing.T, r cudaipc.Region) cudaipc.Region {
	t.Helper()
	r, err := r.Dup()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// chain returns a blob of n hashes: those of blocks from, from+1, ...
func chain(from, n int) []byte {
	blob := make([]byte, n*hashLen)
	for i := range n {
		binary.LittleEndian.PutUint64(blob[i*hashLen:], uint64(from+i)+1)
	}
	return blob
}

// section names n hashes from number from on, in the engine's blocks from block on.
func section(from, n int, block uint32) Section {
	s := Section{Hashes: pool.Chain(chain(from, n), hashLen)}
	for i := range n {
		s.Blocks = append(s.Blocks, block+uint32(i))
	}
	return s
}

func save(id uint64, sections ...Section) Job {
	return Job{ID: id, Kind: Save, Epoch: 1, Event: cudaipc.None, Revoke: cudaipc.None, Sections: sections}
}

func load(id uint64, sections ...Section) Job {
	return Job{ID: id, Kind: Load, Epoch: 1, Event: cudaipc.None, Revoke: cudaipc.None, Sections: sections}
}

// hold makes the stream stand still until the returned function is called, at the latest at the
// test's end.
func (s *station) hold(kernel func()) (letGo func()) {
	gate := make(chan struct{})
	letGo = sync.OnceFunc(func() { close(gate) })
	s.t.Cleanup(letGo)
	s.stream.Launch(func() { <-gate; kernel() })
	return letGo
}

// bytesOf returns what a station's blocks contain: the pattern of a seed.
func bytesOf(seed uint64) []byte {
	p := make([]byte, blockSize)
	devicetest.Pattern(p, seed, 0)
	return p
}

func (s *station) write(block uint32, seed uint64) {
	p := bytesOf(seed)
	for r := range s.mem {
		copy(s.mem[r].Mem[int(block)*2*piece:], p[r*2*piece:(r+1)*2*piece])
	}
}

func (s *station) read(block uint32) []byte {
	var p []byte
	for r := range s.mem {
		p = append(p, s.mem[r].Mem[int(block)*2*piece:(int(block)+1)*2*piece]...)
	}
	return p
}

func (s *station) expect(block uint32, seed uint64, what string) {
	s.t.Helper()
	if !bytes.Equal(s.read(block), bytesOf(seed)) {
		s.t.Fatalf("%s: engine block %d has other bytes", what, block)
	}
}

func (s *station) submit(j Job) {
	s.t.Helper()
	if err := s.worker.Submit(j); err != nil {
		s.t.Fatalf("Submit: %v", err)
	}
}

func (s *station) completion() Completion {
	s.t.Helper()
	select {
	case c := <-s.done:
		return c
	case <-time.After(patience):
		s.t.Fatalf("no completion within %v; state %+v", patience, s.worker.State())
		return Completion{}
	}
}

// finish submits a job and wants it to end with one status for all blocks.
func (s *station) finish(j Job, want pool.Status) Completion {
	s.t.Helper()
	s.submit(j)
	return s.ends(j.ID, want)
}

func (s *station) ends(id uint64, want pool.Status) Completion {
	s.t.Helper()
	c := s.completion()
	if c.Job != id {
		s.t.Fatalf("completion of job %d, want %d", c.Job, id)
	}
	for i, got := range c.Status {
		if got != want {
			s.t.Fatalf("job %d, block %d: status %d, want %d", id, i, got, want)
		}
	}
	return c
}

// reaches waits until a thread is in a phase; a completion meanwhile is a failure that why
// explains.
func (s *station) reaches(kind Kind, phase Phase, why string) {
	s.t.Helper()
	devicetest.Until(s.t, fmt.Sprintf("phase %s", phase), func() bool {
		select {
		case c := <-s.done:
			s.t.Fatalf("%s: job %d was completed with %v", why, c.Job, c.Status)
		default:
		}
		state := s.worker.State()
		return [2]ThreadState{state.Save, state.Load}[kind].Phase == phase
	})
}

// stored returns how many leading hashes of a chain the pool has.
func (s *station) stored(from, n int) int {
	return s.pool.Prefix(s.space, 0, pool.Chain(chain(from, n), hashLen))
}
