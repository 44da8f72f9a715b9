package agent

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// memory opens and closes the engines' memory in the device. It bounds that of all sessions: a
// process that exhausts the mappings or the address space that the kernel allows it cannot grow its
// heap, and ends.
type memory struct {
	device     cudaipc.Device
	pendingFDs atomic.Int64 // descriptors of registrations that are not complete
	maxPending int64        // such descriptors at once
	log        *zap.Logger

	mu         sync.Mutex
	regions    int   // open
	bytes      int64 // of these
	maxRegions int
	maxBytes   int64
}

// maxMappedBytes is half of a process's address space.
const maxMappedBytes = 1 << 46

// take counts regions that are to be opened.
func (m *memory) take(regions int, bytes int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if left := m.maxRegions - m.regions; regions > left {
		return fmt.Errorf("%d, allowed: the %d that are left of %d of all sessions together (half of "+
			"vm.max_map_count)", regions, left, m.maxRegions)
	}
	if left := m.maxBytes - m.bytes; bytes > left {
		return fmt.Errorf("%d bytes, allowed: the %d that are left of %d of all sessions together", bytes, left,
			m.maxBytes)
	}
	m.regions += regions
	m.bytes += bytes
	return nil
}

// give ends the count of regions that were closed.
func (m *memory) give(regions int, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.regions -= regions
	m.bytes -= bytes
}

// open returns the number of open regions.
func (m *memory) open() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.regions
}

// close closes a worker's regions. A copy still in flight means that the worker was closed too
// early. The socket's end must prove that no memory is touched, so close logs that and waits as
// long as it takes.
func (m *memory) close(st *seat) {
	for logged := false; ; time.Sleep(closeRetry) {
		err := st.peer.Close()
		if err == nil {
			m.give(st.regions, st.bytes)
			return
		}
		if !logged {
			logged = true
			m.log.Error("regions do not close", zap.String("instance", st.engine.instance), zap.Uint32("rank", st.rank),
				zap.Error(err))
		}
		if !errors.Is(err, cudaipc.ErrBusy) {
			return // the regions stay counted
		}
	}
}

// closeRetry is the pause between attempts to close regions with a copy in flight.
const closeRetry = time.Millisecond

// lostMemory ends the session of a worker whose memory was open in a mover that has ended. Its
// copies have ended; the engine receives the reason and registers again.
func (s *session) lostMemory(why error) {
	s.terminate(endDevice, ipc.ErrCodeInternal,
		fmt.Errorf("the worker's memory is not open any more; register again: %w", why))
}
