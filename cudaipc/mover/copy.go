package mover

import (
	"fmt"
	"sync"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
)

// clientCopy is the agent's record of a copy in a mover.
type clientCopy struct {
	cudaipc.Flight
	of     *clientPeer
	lane   int // its Direction, or sampleLane
	blocks int
	sum    bool
	ended  bool // under Mover.mu
}

// copyBuffers hold copies that are being sent.
var copyBuffers = sync.Pool{New: func() any { return new([]byte) }}

// Copy checks a copy and sends it to the mover.
func (m *Mover) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	p, err := m.beginCopy(c.Peer)
	if err != nil {
		return 0, err
	}
	if err := p.view.CheckCopy(c, int(m.opts.ArenaSize)); err != nil {
		p.view.Release()
		return 0, fmt.Errorf("peer %d: %w", c.Peer, err)
	}
	t, err := m.ticket(&clientCopy{of: p, lane: int(c.Dir), blocks: len(c.Blocks), sum: c.Sum})
	if err != nil {
		p.view.Release()
		return 0, err
	}
	buffer := copyBuffers.Get().(*[]byte)
	*buffer = putCopy(*buffer, t, c)
	_ = p.process.post("copy", *buffer, nil) // if it fails the process ends, and the copy with it
	copyBuffers.Put(buffer)
	return t, nil
}

// beginCopy finds a peer and holds it: while a copy is in flight, Close is ErrBusy.
func (m *Mover) beginCopy(id cudaipc.PeerID) (*clientPeer, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	p, err := m.peerLocked(id)
	if err == nil {
		p.view.Hold()
	}
	return p, err
}

// ticket registers a copy before it is sent, so that its end always finds it.
func (m *Mover) ticket(c *clientCopy) (cudaipc.Ticket, error) {
	p := c.of
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.lost != nil {
		return 0, fmt.Errorf("peer %d: %w: %w", p.view.ID, p.lost, cudaipc.ErrPeer)
	}
	t, err := m.mu.tickets.Enter(p.view, c)
	if err != nil {
		return 0, err
	}
	if p.pending[c.lane]++; p.pending[c.lane] == 1 {
		p.since[c.lane] = p.process.clock.Load()
	}
	return t, nil
}

// finish ends the copy of a ticket with the mover's answer.
func (m *Mover) finish(t cudaipc.Ticket, d cudaipc.Done) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.mu.tickets.Open[t]
	if c == nil || c.ended {
		return fmt.Errorf("end of copy %d, which is not in flight: %w", t, errWire)
	}
	if (d.Bad != nil && len(d.Bad) != c.blocks) || (d.Bad != nil) != (d.Err != nil) ||
		(c.sum && len(d.Sums) != c.blocks) {
		return fmt.Errorf("end of copy %d: %d bad, %d sums of %d blocks: %w", t, len(d.Bad), len(d.Sums), c.blocks,
			errWire)
	}
	c.endLocked(d)
	return nil
}

// endLocked ends a copy. Mover.mu is held.
func (c *clientCopy) endLocked(d cudaipc.Done) {
	c.End, c.ended = d, true
	c.of.pending[c.lane]--
	c.of.since[c.lane] = c.of.process.clock.Load()
	c.Finish()
}

// Done waits for a copy. With timeout 0 or less it only looks.
func (m *Mover) Done(t cudaipc.Ticket, timeout time.Duration) (cudaipc.Done, bool, error) {
	return m.mu.tickets.Await(&m.mu.RWMutex, t, timeout)
}

// A peer has a lane for each direction of copies, and one for samples.
const (
	sampleLane   = 2
	lanesPerPeer = 3
)

// Sum checks a sample and sends it to the mover.
func (m *Mover) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	p, err := m.beginCopy(s.Peer)
	if err != nil {
		return 0, err
	}
	if err := p.view.CheckSample(s); err != nil {
		p.view.Release()
		return 0, fmt.Errorf("peer %d: %w", s.Peer, err)
	}
	t, err := m.ticket(&clientCopy{of: p, lane: sampleLane, blocks: len(s.Blocks), sum: true})
	if err != nil {
		p.view.Release()
		return 0, err
	}
	_ = p.process.post("sample", putSample(nil, t, s), nil) // if it fails the process ends, and the sample with it
	return t, nil
}

// sum puts a sample into its lane.
func (s *server) sum(f *fields, t cudaipc.Ticket) error {
	sample, err := takeSample(f)
	if err != nil {
		return err
	}
	return s.enqueue(sample.Peer, sampleLane, &laneCopy{
		ticket: t, sample: sample,
		// for allBad
		copy: cudaipc.Copy{Peer: sample.Peer, Sum: true, Blocks: make([]cudaipc.Block, len(sample.Blocks))},
	})
}
