package engine

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/cudaipc"
)

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
