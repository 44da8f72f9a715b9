package mockengine

import (
	"errors"
	"fmt"
	"io"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/engine"
)

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
		d, err = openHost(cfg, sizes)
	} else {
		d, err = openCUDA(cfg, sizes)
	}
	if err != nil && d != nil {
		err = errors.Join(err, d.Close())
	}
	return d, err
}

func openHost(cfg *Config, sizes []int64) (*device, error) {
	e, err := engine.NewHost(uint32(cfg.Events), uint32(cfg.Revokes))
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
	e, err := engine.NewCUDA(cudaipc.UUID{}, uint32(cfg.Events), uint32(cfg.Revokes))
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
