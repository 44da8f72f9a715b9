package cudaipc

import (
	"fmt"
	"sync"
	"time"
)

// movedFlight is a copy from its submission until Done has told its end.
type movedFlight struct {
	peer   *movedPeer
	dir    Direction
	blocks int
	sum    bool
	ended  bool // under Mover.mu
	done   chan struct{}
	end    Done // readable once done is closed
}

// copyBuffers are for copies on their way out.
var copyBuffers = sync.Pool{New: func() any { return new([]byte) }}

// Copy checks a copy and sends it to the mover.
func (m *Mover) Copy(c *Copy) (Ticket, error) {
	p, err := m.beginCopy(c.Peer)
	if err != nil {
		return 0, err
	}
	if err := p.view.checkCopy(c, int(m.opts.ArenaSize)); err != nil {
		p.view.underWay.Add(-1)
		return 0, fmt.Errorf("peer %d: %w", c.Peer, err)
	}
	t, err := m.ticket(p, c)
	if err != nil {
		p.view.underWay.Add(-1)
		return 0, err
	}
	buffer := copyBuffers.Get().(*[]byte)
	*buffer = putCopy(*buffer, t, c)
	_ = p.life.post("copy", *buffer, nil) // if it fails the life ends, and the copy with it
	copyBuffers.Put(buffer)
	return t, nil
}

// beginCopy finds the peer and keeps it open: while a copy is under way, Close is ErrBusy.
func (m *Mover) beginCopy(id PeerID) (*movedPeer, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	p, err := m.peerLocked(id)
	if err == nil {
		p.view.underWay.Add(1)
	}
	return p, err
}

// ticket enters a copy into the books before it is sent, so that whatever ends finds it.
func (m *Mover) ticket(p *movedPeer, c *Copy) (Ticket, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if p.lost != nil {
		return 0, fmt.Errorf("peer %d: %w: %w", p.view.id, p.lost, ErrPeer)
	}
	if n := len(p.view.tickets); n >= MaxCopies {
		return 0, fmt.Errorf("peer %d: %d copies not done, at most %d: %w", p.view.id, n, MaxCopies, ErrBusy)
	}
	m.mu.last++
	t := m.mu.last
	m.mu.tickets[t] = &movedFlight{peer: p, dir: c.Dir, blocks: len(c.Blocks), sum: c.Sum, done: make(chan struct{})}
	p.view.tickets[t] = struct{}{}
	if p.pending[c.Dir]++; p.pending[c.Dir] == 1 {
		p.since[c.Dir] = p.life.clock.Load()
	}
	return t, nil
}

// finish ends the copy of a ticket as the mover says.
func (m *Mover) finish(t Ticket, d Done) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.mu.tickets[t]
	if f == nil || f.ended {
		return fmt.Errorf("end of copy %d, which is not under way: %w", t, errMoverWire)
	}
	if (d.Bad != nil && len(d.Bad) != f.blocks) || (d.Bad != nil) != (d.Err != nil) || (f.sum && len(d.Sums) != f.blocks) {
		return fmt.Errorf("end of copy %d: %d bad, %d sums of %d blocks: %w", t, len(d.Bad), len(d.Sums), f.blocks, errMoverWire)
	}
	f.endLocked(d)
	return nil
}

// endLocked ends a flight; Mover.mu is held.
func (f *movedFlight) endLocked(d Done) {
	f.end, f.ended = d, true
	f.peer.pending[f.dir]--
	f.peer.since[f.dir] = f.peer.life.clock.Load()
	f.peer.view.underWay.Add(-1) // before done: whoever saw the end may close the peer
	close(f.done)
}

// Done waits for a copy. With timeout 0 or less it only looks.
func (m *Mover) Done(t Ticket, timeout time.Duration) (Done, bool, error) {
	m.mu.RLock()
	f := m.mu.tickets[t]
	m.mu.RUnlock()
	if f == nil {
		return Done{}, false, fmt.Errorf("ticket %d: %w", t, ErrTicket)
	}
	if !waitClosed(f.done, timeout) {
		return Done{}, false, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.tickets[t] == nil { // another caller was faster
		return Done{}, false, fmt.Errorf("ticket %d: %w", t, ErrTicket)
	}
	delete(m.mu.tickets, t)
	delete(f.peer.view.tickets, t)
	return f.end, true, nil
}

// waitClosed waits for a channel to be closed. With timeout 0 or less it only looks.
func waitClosed(c <-chan struct{}, timeout time.Duration) bool {
	select {
	case <-c:
		return true
	default:
	}
	if timeout <= 0 {
		return false
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-c:
		return true
	case <-timer.C:
		return false
	}
}
