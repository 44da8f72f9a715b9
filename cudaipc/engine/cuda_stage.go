//go:build cuda

package engine

import (
	"errors"
	"runtime"

	"github.com/kvagent/kvagent/cudaipc/driver"
)

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
