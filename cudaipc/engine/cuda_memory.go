//go:build cuda

package engine

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// tensorAlign is PyTorch's alignment of tensors, bytes.
const tensorAlign = 512

// CUDAMemory is a stretch of GPU memory that a device can import. Its engine owns it and frees it
// in Close.
type CUDAMemory struct {
	ID     cudaipc.RegionID
	engine *CUDA
	start  driver.Addr
	size   int64
	parts  []cudaipc.Region
}

// Regions describes the memory for an import: one element, or the pieces of virtual memory, whose
// descriptors stay the engine's.
func (m *CUDAMemory) Regions() []cudaipc.Region { return m.parts }

// Size returns the size in bytes.
func (m *CUDAMemory) Size() int64 { return m.size }

// Alloc makes size bytes of GPU memory, zero, an allocation of its own. The id is the caller's
// choice.
func (e *CUDA) Alloc(id cudaipc.RegionID, size int64) (*CUDAMemory, error) {
	list, err := e.AllocTogether([]cudaipc.RegionID{id}, []int64{size})
	if err != nil {
		return nil, err
	}
	return list[0], nil
}

// AllocTogether makes several stretches in one allocation, as a caching allocator does; with more
// than one, none begins where the allocation does.
func (e *CUDA) AllocTogether(ids []cudaipc.RegionID, sizes []int64) ([]*CUDAMemory, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	total := int64(0)
	if len(ids) > 1 {
		total = tensorAlign
	}
	var list []*CUDAMemory
	for i, id := range ids {
		if err := e.checkLocked(id, sizes[i]); err != nil {
			return nil, err
		}
		list = append(list, &CUDAMemory{ID: id, engine: e, size: sizes[i], start: driver.Addr(total)})
		total += (sizes[i] + tensorAlign - 1) &^ (tensorAlign - 1)
	}
	var base driver.Addr
	var handle driver.Handle
	var err error
	e.front.Do(func() { base, handle, err = allocate(total) })
	if err != nil {
		return nil, err
	}
	for _, m := range list {
		m.parts = []cudaipc.Region{{
			ID:     m.ID,
			Kind:   cudaipc.KindCUDA,
			Size:   uint64(m.size),
			Addr:   uint64(m.start),
			Handle: handle[:],
		}}
		m.start += base
	}
	e.mu.memory = append(e.mu.memory, list...)
	e.mu.owned = append(e.mu.owned, func() error { return driver.Free(base) })
	return list, nil
}

func (e *CUDA) checkLocked(id cudaipc.RegionID, size int64) error {
	if e.mu.closed {
		return errors.New("engine closed")
	}
	if size <= 0 || size > MaxMemory {
		return fmt.Errorf("region %d: size %d is not within 1 and %d bytes", id, size, int64(MaxMemory))
	}
	if id == SyncRegion {
		return fmt.Errorf("region %d is the engine's words", id)
	}
	for _, m := range e.mu.memory {
		if m.ID == id {
			return fmt.Errorf("region %d exists", id)
		}
	}
	return nil
}

func allocate(size int64) (base driver.Addr, handle driver.Handle, err error) {
	if base, err = driver.Alloc(size); err != nil {
		return base, handle, err
	}
	if err = driver.Clear(base, size); err == nil {
		handle, err = driver.ExportMemory(base)
	}
	if err != nil {
		err = errors.Join(err, driver.Free(base))
	}
	return base, handle, err
}

// AllocVirtual makes a stretch of pieces of virtual memory, as PyTorch's expandable segments do.
// The piece is a multiple of the GPU's granularity; the last one is as long as the others, and the
// stretch may end in it.
func (e *CUDA) AllocVirtual(id cudaipc.RegionID, size, piece int64) (*CUDAMemory, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.checkLocked(id, size); err != nil {
		return nil, err
	}
	if piece <= 0 {
		return nil, fmt.Errorf("region %d: pieces of %d bytes", id, piece)
	}
	m := &CUDAMemory{ID: id, engine: e, size: size}
	var v *driver.Range
	var err error
	e.front.Do(func() { v, err = m.fill(driver.Whole(uint64(size), uint64(piece)), uint64(piece)) })
	if err != nil {
		return nil, err
	}
	m.start = v.Start
	m.parts[len(m.parts)-1].Size -= v.Size - uint64(size)
	e.mu.memory = append(e.mu.memory, m)
	e.mu.owned = append(e.mu.owned, v.Close)
	return m, nil
}

// fill reserves the range and makes its pieces. The front calls it.
func (m *CUDAMemory) fill(size, piece uint64) (*driver.Range, error) {
	v, err := driver.NewRange(size)
	if err != nil {
		return nil, err
	}
	for n := uint64(0); err == nil && n < size; n += piece {
		err = m.piece(v, piece)
	}
	if err == nil {
		err = m.engine.ctx.Allow(v.Start, v.Size)
	}
	if err == nil {
		err = driver.Clear(v.Start, int64(v.Size))
	}
	if err != nil {
		return nil, errors.Join(err, v.Close())
	}
	return v, nil
}

func (m *CUDAMemory) piece(v *driver.Range, size uint64) error {
	p, err := m.engine.ctx.Create(size)
	if err != nil {
		return err
	}
	fd, err := p.Export()
	if err == nil {
		m.parts = append(m.parts, cudaipc.Region{ID: m.ID, Kind: cudaipc.KindCUDAFD, Size: size, FD: fd})
		err = v.Map(p, size)
	}
	return errors.Join(err, p.Release())
}

// WriteAt writes bytes to the memory at once, not in the order of any stream.
func (m *CUDAMemory) WriteAt(p []byte, off int64) (int, error) {
	if err := within(m.ID, m.size, len(p), off); err != nil {
		return 0, err
	}
	var err error
	m.engine.copier.Do(func() {
		if to := m.start + driver.Addr(off); len(p) <= stageBytes {
			err = m.engine.stage.write(to, p)
		} else {
			err = driver.Write(to, p)
		}
	})
	return len(p), err
}

// ReadAt reads bytes of the memory at once.
func (m *CUDAMemory) ReadAt(p []byte, off int64) (int, error) {
	if err := within(m.ID, m.size, len(p), off); err != nil {
		return 0, err
	}
	var err error
	m.engine.copier.Do(func() {
		if from := m.start + driver.Addr(off); len(p) <= stageBytes {
			err = m.engine.stage.read(p, from)
		} else {
			err = driver.Read(p, from)
		}
	})
	return len(p), err
}

// stageBytes is the most that a stage copies at once.
const stageBytes = 64 << 10

// stage is pinned memory through which the copy engines move small pieces. The driver sends small
// pieces of other memory through the GPU's compute queue, where each waits for the time slices of
// other processes, some ms.
type stage struct {
	mem    []byte
	stream driver.Stream
	ended  driver.Event
}

func openStage() (s *stage, err error) {
	s = &stage{}
	if s.mem, err = driver.AllocPinned(stageBytes); err != nil {
		return nil, err
	}
	if s.stream, err = driver.NewStream(0); err == nil {
		s.ended, err = driver.NewEvent(false)
	}
	if err != nil {
		return nil, errors.Join(err, driver.FreePinned(s.mem))
	}
	return s, nil
}

func (s *stage) close() error {
	return errors.Join(s.ended.Destroy(), s.stream.Destroy(), driver.FreePinned(s.mem))
}

// write copies at most stageBytes bytes to the GPU and returns when they are there.
func (s *stage) write(a driver.Addr, p []byte) error {
	copy(s.mem, p)
	return s.copy(uint64(a), driver.HostAddr(s.mem), len(p), false)
}

// read copies at most stageBytes bytes from the GPU.
func (s *stage) read(p []byte, a driver.Addr) error {
	err := s.copy(driver.HostAddr(s.mem), uint64(a), len(p), true)
	copy(p, s.mem)
	return err
}

func (s *stage) copy(dst, src uint64, n int, toHost bool) error {
	if n == 0 {
		return nil
	}
	one := driver.List{Dst: []uint64{dst}, Src: []uint64{src}, Len: []uint64{uint64(n)}}
	err := errors.Join(s.stream.Each(&one, toHost), s.ended.Record(s.stream))
	for fired := false; err == nil && !fired; {
		if fired, err = s.ended.Fired(); !fired {
			runtime.Gosched()
		}
	}
	return err
}
