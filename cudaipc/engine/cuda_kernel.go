//go:build cuda

package engine

import (
	"fmt"

	"github.com/kvagent/kvagent/cudaipc/driver"
)

// Fill enqueues a kernel of the driver's own: n bytes of m from off on become word, again and again. off and n are multiples
// of 4 and within m.
func (s *CUDAStream) Fill(m *CUDAMemory, off, n int64, word uint32) {
	if off < 0 || n < 0 || (off|n)%4 != 0 || off > m.size || n > m.size-off {
		panic(fmt.Sprintf("Fill of %d bytes at %d of region %d, which has %d", n, off, m.ID, m.size))
	}
	s.enqueue("Fill", func() error { return s.stream.Set(m.start+driver.Addr(off), word, n/4) })
}

// Finish waits until everything launched before has ended, by asking an event without a pause. Nothing else is launched on
// the engine meanwhile.
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
