//go:build cuda

package engine

import (
	"fmt"
	"sync/atomic"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/driver"
)

// The engine's side of load events (Recorder).

// LoadWords is where the words of MaxLoadEvents load events are in the engine's sync region.
func (e *CUDA) LoadWords() uint64 { return e.behind + maxStreams*gateBytes }

// OpenLoads opens the events whose handles a device gave, joined. Close ends them.
func (e *CUDA) OpenLoads(handles []byte) error {
	if n := len(handles); n == 0 || n%cudaipc.CUDAEventCell != 0 || n > cudaipc.MaxLoadEvents*cudaipc.CUDAEventCell {
		return fmt.Errorf("%d bytes of handles, allowed: 1 to %d times %d", n, cudaipc.MaxLoadEvents, cudaipc.CUDAEventCell)
	}
	var err error
	e.front.Do(func() {
		for ; err == nil && len(handles) > 0; handles = handles[cudaipc.CUDAEventCell:] {
			var event driver.Event
			if event, err = driver.OpenEvent((*driver.Handle)(handles)); err == nil {
				e.loads = append(e.loads, event)
			}
		}
	})
	return err
}

// WaitLoad lets the stream wait for the load of a serial, without a wait of the caller's, if its event is recorded. false: it is not (yet), and
// nothing is launched, for a wait would be over at once.
func (s *CUDAStream) WaitLoad(serial uint64) bool {
	e := s.engine
	i := serial % uint64(len(e.loads))
	if atomic.LoadUint64(cudaipc.Word64(e.words.Mem, e.LoadWords()+8*i)) != serial {
		return false
	}
	s.enqueue("WaitLoad", func() error { return s.stream.AwaitEvent(e.loads[i]) })
	return true
}
