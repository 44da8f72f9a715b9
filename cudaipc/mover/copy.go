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
	buffer := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(buffer)
	return m.submit(c.Peer, &clientCopy{lane: int(c.Dir), blocks: len(c.Blocks), sum: c.Sum},
		func(p *cudaipc.Peer) error { return p.CheckCopy(c, int(m.opts.ArenaSize)) },
		func(t cudaipc.Ticket) []byte {
			*buffer = putCopy(*buffer, t, c)
			return *buffer
		})
}

// Sum checks a sample and sends it to the mover.
func (m *Mover) Sum(s *cudaipc.Sample) (cudaipc.Ticket, error) {
	return m.submit(s.Peer, &clientCopy{lane: sampleLane, blocks: len(s.Blocks), sum: true},
		func(p *cudaipc.Peer) error { return p.CheckSample(s) },
		func(t cudaipc.Ticket) []byte { return putJSON(nil, msgSum, uint64(t), s) })
}

// submit gives a copy its ticket, before it is sent: so its end always finds it.
func (m *Mover) submit(id cudaipc.PeerID, c *clientCopy, check func(*cudaipc.Peer) error,
	message func(cudaipc.Ticket) []byte) (t cudaipc.Ticket, err error) {
	if c.of, err = m.beginCopy(id); err != nil {
		return 0, err
	}
	if err = check(c.of.view); err != nil {
		err = fmt.Errorf("peer %d: %w", id, err)
	} else {
		t, err = m.ticket(c)
	}
	if err != nil {
		c.of.view.Release()
		return 0, err
	}
	_ = c.of.process.post("copy", message(t), nil) // if it fails the process ends, and the copy with it
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

// Poll answers a wait now. It reads the peer's words itself. It asks the mover for an event of a
// GPU, and only if the step word has been reached: before that the answer does not depend on it.
func (m *Mover) Poll(w cudaipc.Wait) (cudaipc.State, error) {
	s, ask, err := m.readWords(w)
	if err != nil || ask == nil {
		return s, err
	}
	return ask.poll(&w)
}

// readWords reads the words, and returns the process whose device has to be asked; nil: none.
func (m *Mover) readWords(w cudaipc.Wait) (s cudaipc.State, ask *process, err error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	p, err := m.peerLocked(w.Peer)
	if err != nil {
		return s, nil, err
	}
	if !p.asks || w.Event == cudaipc.None {
		s, err = p.view.Poll(&w)
		return s, nil, err
	}
	if err := p.view.CheckWait(&w); err != nil {
		return s, nil, err
	}
	w.Event = cudaipc.None
	s, err = p.view.Poll(&w)
	if s.Step < w.Step {
		s.Fired = false
		return s, nil, err
	}
	return s, p.process, err
}

// SetWord writes a word of a peer's sync region, which this side has mapped too.
func (m *Mover) SetWord(id cudaipc.PeerID, off, value uint64) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	p, err := m.peerLocked(id)
	if err != nil {
		return err
	}
	return p.view.SetWord(off, value)
}
