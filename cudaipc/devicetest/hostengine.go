package devicetest

import (
	"bytes"
	"encoding/binary"
	"encoding/gob"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
	"unsafe"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/cudaipc/mover"
)

// childEnv is set in the process that plays the engine, to the kind of its memory.
const childEnv = "KVAGENT_DEVICETEST_ENGINE"

// Child plays the engine, or the mover of a device, and does not return, in a process that
// HostEngine, CUDAEngine or a mover with MoverCommand has started. Programs that do that call it
// first.
func Child() {
	Mover(mover.Open)
	make := newHostPlayer
	switch os.Getenv(childEnv) {
	case "":
		return
	case childCUDA:
		make = newCUDAPlayer(false)
	case childVirtual:
		make = newCUDAPlayer(true)
	}
	if err := play(gob.NewDecoder(os.Stdin), gob.NewEncoder(os.Stdout), make); err != nil {
		fmt.Fprintln(os.Stderr, "engine:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// described is the child's first message: where its memory is.
type described struct {
	GPU     cudaipc.UUID
	Regions []cudaipc.Region // FD, and KindPeer's Addr, are the child's
	Words   cudaipc.Region
	Sync    cudaipc.Sync
}

type answer struct {
	Data []byte
	Err  string
}

type player struct {
	engine revoker
	stream stream
	memory map[cudaipc.RegionID]memory
	gates  []chan struct{}
	set    func(m memory, off, n int64, word uint32) // LaunchSet
	finish func()                                    // waits for the stream without a pause
}

// Methods that the engines of all devices have.
type (
	revoker interface {
		Revoke(word uint32)
		ClearRevoke(word uint32)
	}
	stream interface {
		Launch(f func())
		Record(event uint32)
		SetStep(n uint64)
		Synchronize()
	}
	memory interface {
		io.ReaderAt
		io.WriterAt
		Size() int64
		Regions() []cudaipc.Region
	}
)

// play serves operations until the parent closes the pipe or dies.
func play(in *gob.Decoder, out *gob.Encoder, make func(Spec) (*player, *described, error)) error {
	var spec Spec
	if err := in.Decode(&spec); err != nil {
		return err
	}
	p, d, err := make(spec)
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

func newHostPlayer(spec Spec) (*player, *described, error) {
	engine, err := engine.NewHost(spec.Events, spec.Revokes)
	if err != nil {
		return nil, nil, err
	}
	stream := engine.NewStream()
	p := &player{engine: engine, stream: stream, memory: map[cudaipc.RegionID]memory{}, finish: stream.Synchronize}
	p.set = func(m memory, off, n int64, word uint32) {
		data := bytes.Repeat(binary.LittleEndian.AppendUint32(nil, word), int(n/4))
		p.launch(func() error { _, err := m.WriteAt(data, off); return err })
	}
	d := &described{}
	d.Words, d.Sync = engine.SyncDesc()
	for i, size := range spec.Regions {
		m, err := engine.Alloc(cudaipc.RegionID(i+1), size)
		if err != nil {
			return nil, nil, err
		}
		p.memory[m.ID] = m
		r := m.Region()
		r.Addr = uint64(uintptr(unsafe.Pointer(&m.Mem[0])))
		d.Regions = append(d.Regions, r)
	}
	return p, d, nil
}

func (p *player) do(op *Op) ([]byte, error) {
	switch op.Kind {
	case Write:
		m, err := p.at(op, int64(len(op.Data)))
		if err == nil {
			_, err = m.WriteAt(op.Data, op.Off)
		}
		return nil, err
	case Read:
		m, err := p.at(op, op.Len)
		if err != nil {
			return nil, err
		}
		data := make([]byte, op.Len)
		_, err = m.ReadAt(data, op.Off)
		return data, err
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
	case LaunchCopy:
		return nil, p.launchCopy(op)
	case LaunchSet:
		m, err := p.at(op, op.Len)
		if err == nil {
			p.set(m, op.Off, op.Len, op.Index)
		}
		return nil, err
	case TimeSets:
		return p.timeSets(op)
	default:
		return nil, fmt.Errorf("operation %d", op.Kind)
	}
	return nil, nil
}

func (p *player) launchCopy(op *Op) error {
	from, err := p.at(op, op.Len)
	if err != nil {
		return err
	}
	to := p.memory[cudaipc.RegionID(op.Index)]
	if to == nil {
		return fmt.Errorf("no region %d", op.Index)
	}
	off, data := op.Off, make([]byte, op.Len)
	p.launch(func() error {
		_, err := from.ReadAt(data, off)
		if err == nil {
			_, err = to.WriteAt(data, off)
		}
		return err
	})
	return nil
}

// launch launches a kernel that must not fail.
func (p *player) launch(kernel func() error) {
	p.stream.Launch(func() {
		if err := kernel(); err != nil {
			panic(err)
		}
	})
}

func (p *player) timeSets(op *Op) (took []byte, err error) {
	m, err := p.at(op, op.Len)
	if err != nil {
		return nil, err
	}
	for range op.Step {
		begin := time.Now()
		p.set(m, op.Off, op.Len, op.Index)
		p.finish()
		took = binary.LittleEndian.AppendUint64(took, uint64(time.Since(begin)))
	}
	return took, nil
}

func (p *player) fill(op *Op) error {
	m, err := p.at(op, op.Len)
	if err != nil {
		return err
	}
	data, off := make([]byte, op.Len), op.Off
	Pattern(data, op.Seed, off)
	if op.Kind == LaunchFill {
		p.launch(func() error { _, err := m.WriteAt(data, off); return err })
		return nil
	}
	_, err = m.WriteAt(data, off)
	return err
}

// at finds the memory of an operation on n bytes.
func (p *player) at(op *Op, n int64) (memory, error) {
	m := p.memory[op.Region]
	if m == nil || op.Off < 0 || n < 0 || op.Off > m.Size() || n > m.Size()-op.Off {
		return nil, fmt.Errorf("%d bytes at %d of region %d", n, op.Off, op.Region)
	}
	return m, nil
}
