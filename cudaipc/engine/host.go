// Package engine is the engine's side of the contract: the memory that it shares, its words and
// events, and its streams, on the host and on a GPU. It serves the mock engine, the proof and the
// tests.
package engine

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

// SyncRegion is the region ID of a Host's words.
const SyncRegion cudaipc.RegionID = 1 << 31

// Limits of a host engine.
const (
	MaxEvents    = 1 << 16 // events, and revocation words, of one engine
	MaxMemory    = 1 << 46 // bytes of one HostMemory
	MaxStreamOps = 1024    // operations waiting in a stream; a full one makes Launch wait, as CUDA's does
	revokeAlign  = 64      // bytes; revocation words are written by the scheduler's side, so they get own cache lines
	eventsFrom   = 64      // bytes; offset of the event cells, one cache line after the step word
)

// Host is the engine's side of the host device: shared memory, words, and streams that behave
// like CUDA's. It serves the mock engine and the tests. All methods may be called at once.
type Host struct {
	engineWords

	mu struct {
		sync.Mutex
		memory  []*HostMemory
		streams []*HostStream
		closed  bool
	}
}

// HostMemory is a stretch of memory that a device can import. Its engine owns it and frees it in
// Close.
type HostMemory struct {
	ID  cudaipc.RegionID
	Mem []byte
	FD  int // a memfd sealed against shrinking
}

// Region describes the memory for an import. The descriptor in it stays the engine's: send it by
// SCM_RIGHTS, or Dup.
func (m *HostMemory) Region() cudaipc.Region {
	return cudaipc.Region{ID: m.ID, Kind: cudaipc.KindFD, Size: uint64(len(m.Mem)), FD: m.FD}
}

// Regions describes the memory for an import, as other engines' memory does.
func (m *HostMemory) Regions() []cudaipc.Region { return []cudaipc.Region{m.Region()} }

// Size returns the size in bytes.
func (m *HostMemory) Size() int64 { return int64(len(m.Mem)) }

// WriteAt writes bytes to the memory.
func (m *HostMemory) WriteAt(p []byte, off int64) (int, error) {
	if err := m.within(len(p), off); err != nil {
		return 0, err
	}
	return copy(m.Mem[off:], p), nil
}

// ReadAt reads bytes of the memory.
func (m *HostMemory) ReadAt(p []byte, off int64) (int, error) {
	if err := m.within(len(p), off); err != nil {
		return 0, err
	}
	return copy(p, m.Mem[off:]), nil
}

func (m *HostMemory) within(n int, off int64) error {
	if off < 0 || off > m.Size() || int64(n) > m.Size()-off {
		return fmt.Errorf("%d bytes at %d of region %d, which has %d", n, off, m.ID, m.Size())
	}
	return nil
}

// NewHost makes an engine with that many events and revocation words, none of them recorded or
// revoked, and step 0. Close frees it.
func NewHost(events, revokes uint32) (*Host, error) {
	if events > MaxEvents || revokes > MaxEvents {
		return nil, fmt.Errorf("%d events and %d revocation words, at most %d each", events, revokes, MaxEvents)
	}
	words, err := newEngineWords(events, cudaipc.EventCell, revokes, 0)
	if err != nil {
		return nil, err
	}
	return &Host{engineWords: words}, nil
}

// Alloc makes size bytes of shared memory, zero and not yet populated. The id is the caller's
// choice.
func (e *Host) Alloc(id cudaipc.RegionID, size int64) (*HostMemory, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.closed {
		return nil, errors.New("engine closed")
	}
	if id == SyncRegion {
		return nil, fmt.Errorf("region %d is the engine's words", id)
	}
	for _, m := range e.mu.memory {
		if m.ID == id {
			return nil, fmt.Errorf("region %d exists", id)
		}
	}
	m, err := newHostMemory(id, size)
	if err == nil {
		e.mu.memory = append(e.mu.memory, m)
	}
	return m, err
}

// Close waits for the streams to get through what was launched, ends them, and frees all memory.
func (e *Host) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.closed {
		return nil
	}
	e.mu.closed = true
	for _, s := range e.mu.streams {
		s.close()
	}
	err := e.words.free()
	for _, m := range e.mu.memory {
		err = errors.Join(err, m.free())
	}
	return err
}

func newHostMemory(id cudaipc.RegionID, size int64) (*HostMemory, error) {
	if size <= 0 || size > MaxMemory {
		return nil, fmt.Errorf("region %d: size %d is not within 1 and %d bytes", id, size, int64(MaxMemory))
	}
	fd, err := unix.MemfdCreate(fmt.Sprintf("kvagent-engine-%d", id), unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("region %d: memfd: %w", id, err)
	}
	mem, err := mapSealed(fd, size)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("region %d: %d bytes: %w", id, size, err)
	}
	return &HostMemory{ID: id, Mem: mem, FD: fd}, nil
}

func mapSealed(fd int, size int64) ([]byte, error) {
	if err := unix.Ftruncate(fd, size); err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
		return nil, err
	}
	return unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

func (m *HostMemory) free() error {
	err := unix.Munmap(m.Mem)
	m.Mem = nil
	return errors.Join(err, unix.Close(m.FD))
}
