//go:build cuda

package engine

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// CUDAStream is a stream of an engine, with the methods of HostStream. A kernel is a Go function
// that may read and write the engine's memory: the stream writes to its gate that it has reached
// the kernel, and waits there until the function has returned. After Close of the engine every
// call panics.
type CUDAStream struct {
	engine         *CUDA
	stream         driver.Stream
	reached, pass  *uint32     // the gate: kernels that the stream got to, kernels that have ended
	reachedAt      driver.Addr // the same, as the GPU sees them
	passAt, stepAt driver.Addr
	scratch        driver.Addr   // 8 bytes on the GPU: the step on its way to the word
	kernels        chan func()   // has room for those that room lets in
	room           chan struct{} // one for each kernel that waits, at most HostStreamOps
	ended          sync.WaitGroup

	mu       sync.Mutex // orders launches
	launched uint32
}

// NewStream starts a stream.
func (e *CUDA) NewStream() *CUDAStream {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mu.closed || len(e.mu.streams) == maxStreams {
		panic(fmt.Sprintf("NewStream on a closed engine, or more than %d", maxStreams))
	}
	at := e.extraOff + uint64(len(e.mu.streams))*gateBytes
	s := &CUDAStream{
		engine: e, kernels: make(chan func(), MaxStreamOps), room: make(chan struct{}, MaxStreamOps),
		reached: cudaipc.Word32(e.words.Mem, at), pass: cudaipc.Word32(e.words.Mem, at+gateBytes/2),
	}
	var err error
	e.front.Do(func() { err = s.open(at) })
	if err != nil {
		panic(fmt.Sprintf("NewStream: %v", err))
	}
	e.mu.streams = append(e.mu.streams, s)
	s.ended.Go(s.run)
	return s
}

func (s *CUDAStream) open(gate uint64) (err error) {
	if s.reachedAt, err = s.engine.wordAddr(gate); err != nil {
		return err
	}
	s.passAt = s.reachedAt + gateBytes/2
	if s.stepAt, err = s.engine.wordAddr(0); err != nil {
		return err
	}
	if s.scratch, err = driver.Alloc(tensorAlign); err != nil {
		return err
	}
	s.stream, err = driver.NewStream(0)
	return err
}

// run executes the kernels when the stream reaches them.
func (s *CUDAStream) run() {
	n := uint32(0)
	for f := range s.kernels {
		n++
		for int32(atomic.LoadUint32(s.reached)-n) < 0 {
			look()
		}
		f()
		atomic.StoreUint32(s.pass, n)
		<-s.room
	}
}

// look pauses for the shortest time that the kernel allows.
func look() {
	t := unix.NsecToTimespec(int64(10 * time.Microsecond))
	_ = unix.Nanosleep(&t, nil)
}

// Launch enqueues a kernel: f runs when everything launched before has ended.
func (s *CUDAStream) Launch(f func()) {
	s.room <- struct{}{}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.launched++
	n := s.launched
	s.enqueue("Launch", func() error {
		return errors.Join(s.stream.Tell(s.reachedAt, n), s.stream.WaitFor(s.passAt, n))
	})
	s.kernels <- f
}

// Record records an event: it is pending until the stream reaches this point.
func (s *CUDAStream) Record(event uint32) {
	if event >= s.engine.events {
		panic(fmt.Sprintf("event %d of %d", event, s.engine.events))
	}
	s.enqueue("Record", func() error { return s.engine.recorded[event].Record(s.stream) })
}

// SetStep enqueues a write of the step word, as an engine does it: a small copy from the GPU.
func (s *CUDAStream) SetStep(n uint64) {
	s.enqueue("SetStep", func() error {
		step := driver.List{
			Dst: []uint64{driver.HostAddr(s.engine.words.Mem)},
			Src: []uint64{uint64(s.scratch)},
			Len: []uint64{8},
		}
		return errors.Join(
			s.stream.Set(s.scratch, uint32(n), 1), s.stream.Set(s.scratch+4, uint32(n>>32), 1),
			s.stream.Each(&step, true))
	})
}

// Synchronize waits until everything launched before has ended.
func (s *CUDAStream) Synchronize() {
	done := make(chan struct{})
	s.Launch(func() { close(done) })
	<-done
}

func (s *CUDAStream) enqueue(what string, f func() error) {
	var err error
	s.engine.front.Do(func() { err = f() })
	if err != nil {
		panic(fmt.Sprintf("%s: %v", what, err))
	}
}

// close waits until the stream is empty. No more calls are made.
func (s *CUDAStream) close() error {
	s.Synchronize()
	close(s.kernels)
	s.ended.Wait()
	s.Finish() // the last kernel has ended, and the stream still looks at its gate, which is about to go
	var err error
	s.engine.front.Do(func() { err = errors.Join(s.stream.Destroy(), driver.Free(s.scratch)) })
	return err
}

// Fill enqueues a kernel of the driver: n bytes of m from off on become repetitions of word. off
// and n are multiples of 4 and within m.
func (s *CUDAStream) Fill(m *CUDAMemory, off, n int64, word uint32) {
	if off < 0 || n < 0 || (off|n)%4 != 0 || off > m.size || n > m.size-off {
		panic(fmt.Sprintf("Fill of %d bytes at %d of region %d, which has %d", n, off, m.ID, m.size))
	}
	s.enqueue("Fill", func() error { return s.stream.Set(m.start+driver.Addr(off), word, n/4) })
}

// Finish waits until everything launched before has ended, by polling an event without a pause.
// Nothing else may be launched on the engine meanwhile.
func (s *CUDAStream) Finish() {
	s.enqueue("Finish", func() error {
		end, err := driver.NewEvent(false)
		if err != nil {
			return err
		}
		for err = end.Record(s.stream); err == nil; {
			var fired bool
			if fired, err = end.Fired(); fired {
				break
			}
		}
		if err != nil {
			return err
		}
		return end.Destroy()
	})
}
