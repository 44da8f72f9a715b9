//go:build cuda

package engine

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// CUDA is the engine's side of the CUDA device, with the methods of Host: exported GPU memory,
// words and events. It serves the mock engine and the tests. All methods may be called at once.
type CUDA struct {
	gpu           driver.GPU
	ctx           *driver.Context
	front, copier *driver.Role // launch; copy for the CPU
	stage         *stage       // the copier's
	engineWords                // pinned, with the gates of the streams after them
	recorded      []driver.Event

	mu struct {
		sync.Mutex
		memory  []*CUDAMemory
		owned   []func() error // frees what memory is in
		streams []*CUDAStream
		closed  bool
	}
}

// maxStreams is the limit of one engine; each stream has a gate in the words.
const maxStreams = 64

// gateBytes is the size of a stream's gate: two words on cache lines of their own.
const gateBytes = 128

// NewCUDA makes an engine on a GPU, as NewHost does on the host. A zero UUID means the only
// visible GPU.
func NewCUDA(gpu cudaipc.UUID, events, revokes uint32) (*CUDA, error) {
	if events > cuda.MaxEvents || revokes > MaxEvents {
		return nil, fmt.Errorf("%d events, at most %d, and %d revocation words, at most %d", events, cuda.MaxEvents,
			revokes, MaxEvents)
	}
	found, err := cuda.FindGPU(gpu)
	if err != nil {
		return nil, err
	}
	e := &CUDA{gpu: found}
	if err := e.open(events, revokes); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

func (e *CUDA) open(events, revokes uint32) (err error) {
	if e.ctx, err = driver.Retain(e.gpu.Ordinal); err != nil {
		return err
	}
	if e.copier, err = driver.StartRole(e.ctx); err != nil {
		return err
	}
	if e.copier.Do(func() { e.stage, err = openStage() }); err != nil {
		return err
	}
	if e.front, err = driver.StartRole(e.ctx); err != nil {
		return err
	}
	if e.engineWords, err = newEngineWords(events, cudaipc.CUDAEventCell, revokes,
		maxStreams*gateBytes); err != nil {
		return err
	}
	e.front.Do(func() { err = e.openEvents(events) })
	return err
}

func (e *CUDA) openEvents(events uint32) error {
	if err := driver.Register(e.words.Mem); err != nil {
		return err
	}
	for i := range uint64(events) {
		event, err := driver.NewEvent(true)
		if err != nil {
			return err
		}
		e.recorded = append(e.recorded, event)
		handle, err := event.Export()
		if err != nil {
			return err
		}
		copy(e.words.Mem[eventsFrom+i*cudaipc.CUDAEventCell:], handle[:])
	}
	return nil
}

// GPU returns the UUID of the engine's GPU.
func (e *CUDA) GPU() cudaipc.UUID { return e.gpu.UUID }

// Close waits for the streams to get through what was launched, ends them, and frees all memory.
func (e *CUDA) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.closed {
		return nil
	}
	e.mu.closed = true
	var errs []error
	for _, s := range e.mu.streams {
		errs = append(errs, s.close())
	}
	if e.front != nil {
		e.front.Do(func() { errs = append(errs, e.freeAll()) })
	}
	if e.stage != nil {
		e.copier.Do(func() { errs = append(errs, e.stage.close()) })
	}
	for _, r := range []*driver.Role{e.front, e.copier} {
		if r != nil {
			r.Close()
		}
	}
	if e.ctx != nil {
		errs = append(errs, e.ctx.Release())
	}
	for _, m := range e.mu.memory {
		for i := range m.parts {
			if m.parts[i].Kind == cudaipc.KindCUDAFD {
				errs = append(errs, unix.Close(m.parts[i].FD))
			}
		}
	}
	if e.words != nil {
		errs = append(errs, e.words.free())
	}
	return errors.Join(errs...)
}

// freeAll frees the engine's driver objects. The front calls it.
func (e *CUDA) freeAll() error {
	var errs []error
	for _, event := range e.recorded {
		errs = append(errs, event.Destroy())
	}
	for _, free := range e.mu.owned {
		errs = append(errs, free())
	}
	if e.words != nil {
		errs = append(errs, driver.Unregister(e.words.Mem))
	}
	return errors.Join(errs...)
}

// wordAddr returns the GPU's address of a word.
func (e *CUDA) wordAddr(off uint64) (driver.Addr, error) {
	start, err := driver.Address(e.words.Mem)
	return start + driver.Addr(off), err
}
