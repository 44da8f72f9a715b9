package engine

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/cudaipc"
)

// HostStream runs what is launched on it one after the other, on a goroutine of its own. It belongs
// to its engine, whose Close ends it. Calls are ordered as they are made; a caller that wants an
// order between two goroutines makes it itself. After Close of the engine every call panics.
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

// Record records an event: from now on it has not fired, until the stream gets here. Recorded again
// before it fired, it stands for the later record, as CUDA's does.
func (s *HostStream) Record(event uint32) {
	e := s.engine
	if event >= e.events {
		panic(fmt.Sprintf("event %d of %d", event, e.events))
	}
	off := uint64(eventsFrom) + uint64(event)*cudaipc.EventCell
	number := atomic.AddUint64(cudaipc.Word64(e.words.Mem, off), 1)
	s.ops <- func() { raise(cudaipc.Word64(e.words.Mem, off+8), number) }
}

// SetStep enqueues the write of the step word: all kernels launched before have ended when it can
// be read. Steps only grow: a smaller number than the word's leaves it.
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

// raise sets a shared word to n unless it is higher already: two streams may reach the same word.
func raise(word *uint64, n uint64) {
	for {
		old := atomic.LoadUint64(word)
		if old >= n || atomic.CompareAndSwapUint64(word, old, n) {
			return
		}
	}
}
