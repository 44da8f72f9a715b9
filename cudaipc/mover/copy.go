package mover

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// copyBuffers hold copies that are being sent.
var copyBuffers = sync.Pool{New: func() any { return new([]byte) }}

// Copy checks a copy and sends it to the mover.
func (m *Mover) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	var proc *process
	t, err := m.table.Copy(c, m.opts.ArenaSize, func(p *peer, f *cudaipc.Flight) { proc = p.begin(f) })
	if err == nil {
		buffer := copyBuffers.Get().(*[]byte)
		defer copyBuffers.Put(buffer)
		*buffer = putCopy(*buffer, t, c)
		_ = proc.post("copy", *buffer, nil) // if it fails the process ends, and the copy with it
	}
	return t, err
}

// Sum checks a sample and sends it to the mover.
func (m *Mover) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	var proc *process
	t, err := m.table.Sum(s, func(p *peer, f *cudaipc.Flight) { proc = p.begin(f) })
	if err == nil {
		_ = proc.post("sum", pack(nil, msgSum, uint64(t), s), nil) // as in Copy
	}
	return t, err
}

// begin notes that a flight was submitted. The table is locked, but supervise reads without it:
// pending last.
func (p *peer) begin(f *cudaipc.Flight) *process {
	l := p.lane(f)
	if l.pending.Load() == 0 {
		l.since.Store(p.process.clock.Load())
	}
	l.pending.Add(1)
	return p.process
}

// finish ends the copy of a ticket with the mover's answer.
func (p *process) finish(t cudaipc.Ticket, d cudaipc.Done) error {
	err := p.m.table.Finish(t, d, func(of *peer, f *cudaipc.Flight) {
		l := of.lane(f)
		l.pending.Add(-1)
		l.since.Store(p.clock.Load())
	})
	if err != nil {
		return fmt.Errorf("%w: %w", errWire, err)
	}
	return nil
}

// Done waits for a copy. With timeout 0 or less it only looks.
func (m *Mover) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	return m.table.Done(t, timeout)
}

// A peer has a lane for each direction of copies, and one for samples.
const (
	sampleLane = 2
	lanes      = 3
)

func (p *peer) lane(f *cudaipc.Flight) *lane {
	if f.Copy == nil {
		return &p.lanes[sampleLane]
	}
	return &p.lanes[f.Copy.Dir]
}

// Poll answers a wait now. It reads the peer's words itself. It asks the mover for an event of a
// GPU, and only if the step word has been reached: before that the answer does not depend on it.
func (m *Mover) Poll(w cudaipc.Wait) (cudaipc.State, error) {
	p, s, ask, err := m.readWords(&w)
	if err != nil || !ask {
		return s, err
	}
	return p.process.poll(w)
}

// readWords reads the words, and reports whether the device has to be asked.
func (m *Mover) readWords(w *cudaipc.Wait) (p *peer, s cudaipc.State, ask bool, err error) {
	m.table.RLock()
	defer m.table.RUnlock()
	if p, err = m.table.PeerLocked(w.Peer); err != nil {
		return p, s, false, err
	}
	if p.asks {
		s, ask, err = p.PollStep(w)
	} else {
		s, err = p.Poll(w)
	}
	return p, s, ask, err
}

// SetWord writes a word of a peer's sync region, which this side has mapped too.
func (m *Mover) SetWord(id cudaipc.PeerID, off, value uint64) error {
	return m.table.SetWord(id, off, value)
}
