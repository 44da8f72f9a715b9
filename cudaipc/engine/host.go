// Package engine is the engine's side of the contract: the memory that it shares, its words and
// events, and its streams, on the host and on a GPU. It serves the mock engine, the proof and the
// tests.
package engine

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

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
	if err := within(m.ID, m.Size(), len(p), off); err != nil {
		return 0, err
	}
	return copy(m.Mem[off:], p), nil
}

// ReadAt reads bytes of the memory.
func (m *HostMemory) ReadAt(p []byte, off int64) (int, error) {
	if err := within(m.ID, m.Size(), len(p), off); err != nil {
		return 0, err
	}
	return copy(p, m.Mem[off:]), nil
}

// within checks that n bytes at off are in a region of size bytes.
func within(id cudaipc.RegionID, size int64, n int, off int64) error {
	if off < 0 || off > size || int64(n) > size-off {
		return fmt.Errorf("%d bytes at %d of region %d, which has %d", n, off, id, size)
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

// engineWords are the words of an engine, in shared memory of their own: the step word, a cell
// for each event, and the revocation words.
type engineWords struct {
	words           *HostMemory
	events, revokes uint32
	revokeOff       uint64
	extraOff        uint64 // where the extra bytes begin
}

// wordsAlign is the alignment of the extra bytes after the words.
const wordsAlign = 128

// MaxStageWords is how many words for loads by stages an engine on the host has.
const MaxStageWords = wordsAlign / 8

// newEngineWords makes words with event cells of cell bytes, and more extra bytes after them.
func newEngineWords(events uint32, cell uint64, revokes uint32, more uint64) (w engineWords, err error) {
	end := uint64(eventsFrom) + uint64(events)*cell
	w.events, w.revokes = events, revokes
	w.revokeOff = (end + revokeAlign - 1) &^ (revokeAlign - 1)
	w.extraOff = (w.revokeOff + uint64(revokes)*4 + wordsAlign - 1) &^ (wordsAlign - 1)
	w.words, err = newHostMemory(SyncRegion, int64(w.extraOff+max(more, wordsAlign)))
	return w, err
}

// SyncDesc describes the words for an import: their region, whose descriptor stays the engine's,
// and their places.
func (w *engineWords) SyncDesc() (cudaipc.Region, cudaipc.Sync) {
	return w.words.Region(), cudaipc.Sync{
		Region: SyncRegion, StepOff: 0,
		EventsOff: eventsFrom, Events: w.events,
		RevokeOff: w.revokeOff, Revokes: w.revokes,
	}
}

// Step returns the step word: the last step that a stream has passed.
func (w *engineWords) Step() uint64 { return atomic.LoadUint64(cudaipc.Word64(w.words.Mem, 0)) }

// StageWords returns the offset of MaxStageWords words of 8 bytes for loads by stages, in the
// region of the words. Only engines on the host have them.
func (w *engineWords) StageWords() uint64 { return w.extraOff }

// StageWord returns one of the words for loads by stages. The engine sets it to 0 before a load
// that names it.
func (w *engineWords) StageWord(i uint32) *uint64 {
	if i >= MaxStageWords {
		panic(fmt.Sprintf("word of a load by stages %d of %d", i, MaxStageWords))
	}
	return cudaipc.Word64(w.words.Mem, w.extraOff+uint64(i)*8)
}

// Revoke sets revocation word i: a save that names it is not committed from now on.
func (w *engineWords) Revoke(i uint32) { atomic.StoreUint32(w.revokeWord(i), 1) }

// ClearRevoke makes word i usable for another save.
func (w *engineWords) ClearRevoke(i uint32) { atomic.StoreUint32(w.revokeWord(i), 0) }

func (w *engineWords) revokeWord(i uint32) *uint32 {
	if i >= w.revokes {
		panic(fmt.Sprintf("revocation word %d of %d", i, w.revokes))
	}
	return cudaipc.Word32(w.words.Mem, w.revokeOff+uint64(i)*4)
}

// HostStream runs what is launched on it in order, on a goroutine of its own. It belongs to its
// engine, whose Close ends it. The order of calls is the order of execution; concurrent callers
// order themselves. After Close of the engine every call panics.
type HostStream struct {
	engine *Host
	ops    chan func()
	ended  chan struct{}
	once   sync.Once
}

// NewStream starts a stream.
func (e *Host) NewStream() *HostStream {
	s := &HostStream{engine: e, ops: make(chan func(), MaxStreamOps), ended: make(chan struct{})}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.closed {
		panic("NewStream on a closed engine")
	}
	e.mu.streams = append(e.mu.streams, s)
	go s.run()
	return s
}

func (s *HostStream) run() {
	defer close(s.ended)
	for op := range s.ops {
		op()
	}
}

// Launch enqueues a kernel: f runs when everything launched before has ended.
func (s *HostStream) Launch(f func()) { s.ops <- f }

// Record records an event: it is pending until the stream reaches this point. If it is recorded
// again before, it stands for the later record, as CUDA's does.
func (s *HostStream) Record(event uint32) {
	e := s.engine
	if event >= e.events {
		panic(fmt.Sprintf("event %d of %d", event, e.events))
	}
	off := uint64(eventsFrom) + uint64(event)*cudaipc.EventCell
	number := atomic.AddUint64(cudaipc.Word64(e.words.Mem, off), 1)
	s.ops <- func() { raise(cudaipc.Word64(e.words.Mem, off+8), number) }
}

// SetStep enqueues a write of the step word: when it can be read, all kernels launched before
// have ended. Steps only grow: a smaller number is ignored.
func (s *HostStream) SetStep(n uint64) {
	s.ops <- func() { raise(cudaipc.Word64(s.engine.words.Mem, 0), n) }
}

// Synchronize waits until everything launched before has ended.
func (s *HostStream) Synchronize() {
	done := make(chan struct{})
	s.ops <- func() { close(done) }
	<-done
}

func (s *HostStream) close() {
	s.once.Do(func() { close(s.ops) })
	<-s.ended
}

// raise sets a shared word to n unless it is higher already: two streams may write the same word.
func raise(word *uint64, n uint64) {
	for {
		old := atomic.LoadUint64(word)
		if old >= n || atomic.CompareAndSwapUint64(word, old, n) {
			return
		}
	}
}
