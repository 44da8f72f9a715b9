package proof

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	engines "github.com/kvagent/kvagent/cudaipc/engine"
)

// childEnv is set in a process that plays an engine or an agent, or runs one check.
const childEnv = "KVAGENT_PROOF_CHILD"

// IsChild reports whether this process was started by a proof and must call Child.
func IsChild() bool { return os.Getenv(childEnv) != "" }

// Child plays an engine or an agent until its parent ends, or runs one check.
func Child() error {
	if role := os.Getenv(childEnv); strings.HasPrefix(role, checkChild) {
		return playCheck(role)
	}
	var o order
	fds, err := receive(controlFD, &o)
	if err != nil {
		return err
	}
	if o.Op == opAgent {
		return playAgent(&o, fds)
	}
	return playEngine(&o)
}

// engine is memory on the GPU, and one stream.
type engine struct {
	cuda   *engines.CUDA
	stream *engines.CUDAStream
	memory map[cudaipc.RegionID]*engines.CUDAMemory
}

func playEngine(first *order) error {
	e, a, fds, err := newEngine(first)
	if err != nil {
		return send(controlFD, &answer{Err: err.Error()})
	}
	if err := send(controlFD, a, fds...); err != nil {
		return err
	}
	for {
		var o order
		if _, err := receive(controlFD, &o); err != nil {
			return nil //nolint:nilerr // the parent has what it wanted
		}
		a, err := e.do(&o)
		if err != nil {
			a.Err = err.Error()
		}
		if err := send(controlFD, &a); err != nil {
			return err
		}
	}
}

func newEngine(o *order) (*engine, *answer, []int, error) {
	c, err := engines.NewCUDA(cudaipc.UUID{}, 4, 4)
	if err != nil {
		return nil, nil, nil, err
	}
	e := &engine{cuda: c, stream: c.NewStream(), memory: map[cudaipc.RegionID]*engines.CUDAMemory{}}
	list, err := e.allocate(o)
	if err != nil {
		return nil, nil, nil, err
	}
	a := &answer{GPU: c.GPU()}
	for _, m := range list {
		e.memory[m.ID] = m
		a.Regions = append(a.Regions, m.Regions()...)
	}
	words, sync := c.SyncDesc()
	a.Regions, a.Sync = append(a.Regions, words), &sync
	var fds []int
	for i := range a.Regions {
		if withFD(&a.Regions[i]) {
			fds = append(fds, a.Regions[i].FD)
		}
	}
	return e, a, fds, nil
}

func (e *engine) allocate(o *order) (list []*engines.CUDAMemory, err error) {
	ids := make([]cudaipc.RegionID, len(o.Sizes))
	for i := range ids {
		ids[i] = cudaipc.RegionID(i + 1)
	}
	if !o.Virtual {
		return e.cuda.AllocTogether(ids, o.Sizes)
	}
	for i, id := range ids {
		m, err := e.cuda.AllocVirtual(id, o.Sizes[i], o.Piece)
		if err != nil {
			return nil, err
		}
		list = append(list, m)
	}
	return list, nil
}

func (e *engine) do(o *order) (a answer, err error) {
	m := e.memory[o.Region]
	if m == nil && o.Op != opHold {
		return a, fmt.Errorf("region %d is not there", o.Region)
	}
	switch o.Op {
	case opFill:
		mem := make([]byte, m.Size())
		pattern(mem, o.Seed)
		_, err = m.WriteAt(mem, 0)
	case opCheck:
		mem := make([]byte, m.Size())
		_, err = m.ReadAt(mem, 0)
		a.Wrong = wrong(mem, o.Seed)
	case opProduce:
		e.stream.Launch(func() { time.Sleep(o.Delay) })
		e.stream.Fill(m, 0, m.Size(), o.Word)
		e.stream.SetStep(o.Step)
		e.stream.Record(0)
	case opHold:
		e.stream.Launch(func() { select {} })
		e.stream.Record(0)
	case opLoop:
		a.P50, a.P99 = e.loop(m, o)
	default:
		err = errors.New("no such order")
	}
	return a, err
}

// loop runs one kernel repeatedly and returns its times, us.
func (e *engine) loop(m *engines.CUDAMemory, o *order) (p50, p99 float64) {
	took := make([]float64, o.Rounds)
	for i := range took {
		begin := time.Now()
		e.stream.Fill(m, 0, o.Len, uint32(i))
		e.stream.Finish()
		took[i] = float64(time.Since(begin)) / float64(time.Microsecond)
	}
	slices.Sort(took)
	return took[len(took)/2], took[len(took)*99/100]
}
