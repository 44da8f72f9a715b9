package mover

import (
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
		Name: m.opts.Name, Device: m.opts.Device, GPU: m.opts.GPU, Peers: len(m.mu.peers), Starts: h.starts,
		Requests: m.requests.Load(), Lost: make(map[cudaipc.LossReason]uint64, len(h.lost)), LastLoss: h.last,
		NextStart: h.notBefore,
	}
	s.Failing = m.mu.process == nil && h.row >= 2 && (h.opened > 0 || m.opts.GPU == (cudaipc.UUID{}))
	for reason, n := range h.lost {
		s.Lost[reason] = n
	}
	for _, p := range m.mu.peers {
		s.Copies += p.pending[cudaipc.Gather] + p.pending[cudaipc.Scatter]
	}
	if proc := m.mu.process; proc != nil && proc.cmd.Process != nil {
		s.Pid, s.Since, s.Node = proc.cmd.Process.Pid, proc.begun, proc.bound
		if info := proc.info.Load(); info != nil {
			s.Info = *info
		}
		s.PingAge = time.Duration(proc.clock.Load()-proc.pong.Load()) * m.opts.Limits.Tick
	}
	return []cudaipc.MoverState{s}
}
