package mover

import (
	"maps"
	"time"

	"github.com/kvagent/kvagent/backoff"
	"github.com/kvagent/kvagent/cudaipc"
)

// history counts the processes that have ended.
type history struct {
	starts    uint64
	opened    uint64 // starts that led to an open device
	lost      map[cudaipc.LossReason]uint64
	last      error
	lastAt    time.Time
	row       int // losses in a row, each soon after its start
	pauses    backoff.Backoff
	notBefore time.Time // of the next start
}

// loss records a loss and decides when the next process may start: at once after the first, with
// a growing pause after later ones.
func (h *history) loss(proc *process, limits *Limits) {
	h.lost[proc.reason]++
	h.last, h.lastAt = proc.err(), time.Now()
	if time.Since(proc.begun) >= limits.Steady {
		h.row = 0
		h.pauses.Reset()
	}
	h.row++
	if h.row < 2 {
		h.notBefore = time.Time{}
		return
	}
	h.pauses.First, h.pauses.Last = limits.Again, limits.AtMost
	h.notBefore = h.lastAt.Add(h.pauses.Next())
}

func (m *Mover) lastLoss() error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.mu.history.last
}

// Movers returns the state of this mover.
func (m *Mover) Movers() []cudaipc.MoverState {
	m.mu.RLock()
	defer m.mu.RUnlock()
	h := &m.mu.history
	s := cudaipc.MoverState{
		Name: m.opts.Name, Device: m.opts.Device, Peers: len(m.mu.peers), Starts: h.starts,
		Requests: m.requests.Load(), Lost: maps.Clone(h.lost),
		NextStartMS: max(time.Until(h.notBefore).Milliseconds(), 0),
	}
	if h.last != nil {
		s.LastLoss = h.last.Error()
	}
	if m.opts.Device == cudaipc.CUDADevice {
		s.GPU = &cudaipc.CUDAInfo{}
	}
	s.Failing = m.mu.process == nil && h.row >= 2 && (h.opened > 0 || m.opts.GPU == (cudaipc.UUID{}))
	for _, p := range m.mu.peers {
		s.Copies += p.pending[cudaipc.Gather] + p.pending[cudaipc.Scatter]
	}
	if proc := m.mu.process; proc != nil && proc.cmd.Process != nil {
		s.PID, s.Running, s.Node = proc.cmd.Process.Pid, true, proc.bound
		s.UpSeconds = time.Since(proc.begun).Seconds()
		if info := proc.info.Load(); info != nil {
			s.GPU = info
		}
		s.PingAgeMS = (time.Duration(proc.clock.Load()-proc.pong.Load()) * m.opts.Limits.Tick).Milliseconds()
	}
	return []cudaipc.MoverState{s}
}
