package devicetest

import (
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"github.com/kvagent/kvagent/cudaipc"
)

// childEnv is set in the process that plays the engine.
const childEnv = "KVAGENT_DEVICETEST_ENGINE"

// Child plays the engine, or the mover of a host device, and does not return, in a process that HostEngine or a mover with
// MoverCommand has started. A test binary that uses them calls it first in TestMain.
func Child() {
	Mover(cudaipc.OpenMoved)
	if os.Getenv(childEnv) == "" {
		return
	}
	if err := play(gob.NewDecoder(os.Stdin), gob.NewEncoder(os.Stdout)); err != nil {
		fmt.Fprintln(os.Stderr, "engine:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// described is what the child tells at its start: where its memory is.
type described struct {
	Regions []cudaipc.Region // FD and Addr are the child's
	Words   cudaipc.Region
	Sync    cudaipc.Sync
}

type answer struct {
	Data []byte
	Err  string
}

type player struct {
	engine *cudaipc.HostEngine
	stream *cudaipc.HostStream
	memory map[cudaipc.RegionID][]byte
	gates  []chan struct{}
}

// play serves operations until the parent closes the pipe, or is gone.
func play(in *gob.Decoder, out *gob.Encoder) error {
	var spec Spec
	if err := in.Decode(&spec); err != nil {
		return err
	}
	p, d, err := newPlayer(spec)
	if err != nil {
		return err
	}
	if err := out.Encode(d); err != nil {
		return err
	}
	for {
		var op Op
		if err := in.Decode(&op); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		var a answer
		if a.Data, err = p.do(&op); err != nil {
			a.Err = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
}

func newPlayer(spec Spec) (*player, *described, error) {
	engine, err := cudaipc.NewHostEngine(spec.Events, spec.Revokes)
	if err != nil {
		return nil, nil, err
	}
	p := &player{engine: engine, stream: engine.NewStream(), memory: map[cudaipc.RegionID][]byte{}}
	d := &described{}
	d.Words, d.Sync = engine.SyncDesc()
	for i, size := range spec.Regions {
		m, err := engine.Alloc(cudaipc.RegionID(i+1), size)
		if err != nil {
			return nil, nil, err
		}
		p.memory[m.ID] = m.Mem
		r := m.Region()
		r.Addr = uint64(uintptr(unsafe.Pointer(&m.Mem[0])))
		d.Regions = append(d.Regions, r)
	}
	return p, d, nil
}

func (p *player) do(op *Op) ([]byte, error) {
	switch op.Kind {
	case Write:
		dst, err := p.at(op, int64(len(op.Data)))
		copy(dst, op.Data)
		return nil, err
	case Read:
		return p.at(op, op.Len)
	case Fill, LaunchFill:
		return nil, p.fill(op)
	case Hold:
		gate := make(chan struct{})
		p.gates = append(p.gates, gate)
		p.stream.Launch(func() { <-gate })
	case LetGo:
		if len(p.gates) == 0 {
			return nil, fmt.Errorf("no hold to let go")
		}
		close(p.gates[0])
		p.gates = p.gates[1:]
	case Record:
		p.stream.Record(op.Index)
	case SetStep:
		p.stream.SetStep(op.Step)
	case Synchronize:
		p.stream.Synchronize()
	case Revoke:
		p.engine.Revoke(op.Index)
	case ClearRevoke:
		p.engine.ClearRevoke(op.Index)
	default:
		return nil, fmt.Errorf("operation %d", op.Kind)
	}
	return nil, nil
}

func (p *player) fill(op *Op) error {
	dst, err := p.at(op, op.Len)
	if err != nil {
		return err
	}
	seed, off := op.Seed, op.Off
	if op.Kind == LaunchFill {
		p.stream.Launch(func() { Pattern(dst, seed, off) })
		return nil
	}
	Pattern(dst, seed, off)
	return nil
}

func (p *player) at(op *Op, n int64) ([]byte, error) {
	mem := p.memory[op.Region]
	if op.Off < 0 || n < 0 || op.Off > int64(len(mem)) || n > int64(len(mem))-op.Off {
		return nil, fmt.Errorf("%d bytes at %d of region %d", n, op.Off, op.Region)
	}
	return mem[op.Off : op.Off+n], nil
}
