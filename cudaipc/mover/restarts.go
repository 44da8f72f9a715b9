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
		Name: m.opts.Name, Device: m.opts.Device, Starts: h.starts,
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
	if proc := m.mu.process; proc != nil && proc.cmd.Process != nil {
		s.PID, s.Running, s.Node = proc.cmd.Process.Pid, true, proc.bound
		s.UpSeconds = time.Since(proc.begun).Seconds()
		s.Peers, s.Copies = len(proc.peers), len(proc.flights)
		if info := proc.info.Load(); info != nil {
			s.GPU = info
		}
		s.PingAgeMS = (time.Duration(proc.clock.Load()-proc.pong.Load()) * m.opts.Limits.Tick).Milliseconds()
	}
	return []cudaipc.MoverState{s}
}

// A mover's end: supervise.go notices it or demands it, process.go reaps it, this file kills and
// reports it, and decides when the next mover starts, and the agent ends the sessions of its peers.

// lose kills the process; only the first reason counts. run does the rest once it is reaped.
func (p *process) lose(reason cudaipc.LossReason, cause error) {
	p.once.Do(func() {
		p.reason, p.cause = reason, cause
		close(p.ending)
		if child := p.cmd.Process; child != nil {
			_ = p.m.opts.Kill(child) // fails only if the process has ended
		}
	})
}

// disconnect handles a closed socket. If the process has exited it is about to be reaped, and its
// exit status says more; otherwise it is killed.
func (p *process) disconnect(cause error) {
	if !disconnected(cause) || !cudaipc.ClosesWithin(p.ending, hangUpWait) {
		p.lose(cudaipc.LostCrash, cause)
	}
}

// hangUpWait is how long a process may take to be reaped after it closed its socket.
const hangUpWait = 100 * time.Millisecond

// err returns why the process ended. It may be called once ending is closed.
func (p *process) err() error {
	return &cudaipc.LostError{Mover: p.m.opts.Name, Reason: p.reason, Cause: p.cause}
}

// end ends the work of a process that is reaped. Messages that were received before count;
// everything else has failed.
func (p *process) end() {
	_ = p.conn.conn.SetReadDeadline(time.Now().Add(endWait)) // its other end is closed: read has no more to wait for
	p.joined.Wait()
	p.conn.close()
	p.m.remove(p)
	lost := p.open()
	for _, one := range lost { // whoever sees the end of a copy finds its peer lost
		one.Lose(p.err())
	}
	p.fail()
	for _, one := range lost {
		if one.lost != nil && !p.quitting.Load() {
			one.lost(p.err())
		}
	}
	close(p.ended)
}

// remove deletes a process: it gets no more peers, copies and calls.
func (m *Mover) remove(proc *process) {
	m.mu.Lock()
	defer m.mu.Unlock()
	proc.over = true
	if m.mu.process == proc {
		m.mu.process = nil
	}
	if !proc.quitting.Load() {
		m.mu.history.loss(proc, &m.opts.Limits)
	}
}

// fail ends the copies and calls of a process that was removed.
func (p *process) fail() {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	for _, f := range p.flights {
		f.Fail(p.err())
	}
	for _, call := range p.calls {
		call.err = p.err()
		close(call.done)
	}
	clear(p.flights)
	clear(p.calls)
}
