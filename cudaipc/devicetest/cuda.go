package devicetest

import (
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	engines "github.com/kvagent/kvagent/cudaipc/engine"
)

// Values of childEnv for engines on a GPU: their memory is an allocation, or virtual.
const (
	childCUDA    = "cuda"
	childVirtual = "virtual"
)

// VirtualPiece is the size of the pieces of virtual memory, bytes: the granularity of all GPUs so
// far.
const VirtualPiece = 2 << 20

// CUDA opens the CUDA device on the only GPU, with an arena of arenaSize bytes. Regions are of the
// given kind: cudaipc.KindCUDA or cudaipc.KindCUDAFD. The test's end closes everything. change may
// be nil.
func CUDA(t T, arenaSize int64, kind cudaipc.Kind, change func(*cuda.Options)) Fixture {
	t.Helper()
	fd, arena := newArena(t, arenaSize)
	defer func() { _ = unix.Close(fd) }()
	o := cuda.Options{Arena: arena}
	if change != nil {
		change(&o)
	}
	device, err := cuda.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeDevice(t, device) })
	return Fixture{
		Device: device,
		Arena:  arena,
		Engine: func(t T, s Spec) Engine { return CUDAEngine(t, s, kind) },
	}
}

// CUDAEngine starts this binary once more as an engine on the only GPU.
func CUDAEngine(t T, s Spec, kind cudaipc.Kind) Engine {
	t.Helper()
	env := childCUDA
	if kind == cudaipc.KindCUDAFD {
		env = childVirtual
	}
	p, err := startProcess(s, kind, env)
	if err != nil {
		t.Fatalf("engine: %v", err)
	}
	t.Cleanup(p.Kill)
	return p
}

// Pinned waits until nothing more of the arena will be pinned.
func Pinned(t T, d *cuda.Device) {
	t.Helper()
	Until(t, "the pinning ends", func() bool { return d.Info().PinDone })
}

// WithoutPid lets a device not know the processes of its peers, as in a container with another PID
// namespace.
func (f Fixture) WithoutPid() Fixture {
	engine := f.Engine
	f.Engine = func(t T, s Spec) Engine { return stranger{engine(t, s)} }
	return f
}

type stranger struct{ Engine }

func (s stranger) Import() (cudaipc.Import, error) {
	im, err := s.Engine.Import()
	im.Pid = 0
	return im, err
}

func newCUDAPlayer(virtual bool) func(Spec) (*player, *described, error) {
	return func(spec Spec) (*player, *described, error) {
		engine, err := engines.NewCUDA(cudaipc.UUID{}, spec.Events, spec.Revokes)
		if err != nil {
			return nil, nil, err
		}
		stream := engine.NewStream()
		p := &player{engine: engine, stream: stream, memory: map[cudaipc.RegionID]memory{}, finish: stream.Finish}
		p.set = func(m memory, off, n int64, word uint32) { stream.Fill(m.(*engines.CUDAMemory), off, n, word) }
		d := &described{GPU: engine.GPU()}
		d.Words, d.Sync = engine.SyncDesc()
		list, err := allocate(engine, &spec, virtual)
		for _, m := range list {
			p.memory[m.ID] = m
			d.Regions = append(d.Regions, m.Regions()...)
		}
		return p, d, err
	}
}

// allocate puts all regions into one allocation, or each into virtual memory of its own.
func allocate(e *engines.CUDA, s *Spec, virtual bool) ([]*engines.CUDAMemory, error) {
	var list []*engines.CUDAMemory
	var ids []cudaipc.RegionID
	piece := s.Piece
	if piece == 0 {
		piece = VirtualPiece
	}
	for i, size := range s.Regions {
		ids = append(ids, cudaipc.RegionID(i+1))
		if !virtual {
			continue
		}
		m, err := e.AllocVirtual(ids[i], size, piece)
		if err != nil {
			return nil, err
		}
		list = append(list, m)
	}
	if virtual || len(ids) == 0 {
		return list, nil
	}
	return e.AllocTogether(ids, s.Regions)
}
