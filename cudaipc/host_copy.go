package cudaipc

import (
	"fmt"
	"time"
)

// flight is a copy from its submission until Done has told its end.
type flight struct {
	copy *Copy
	peer *peer
	done chan struct{} // closed when result is there
	end  Done
}

// Copy checks a copy and puts it into its stream.
func (h *Host) Copy(c *Copy) (Ticket, error) {
	p, err := h.begin(c)
	if err != nil {
		return 0, err
	}
	if err := p.checkCopy(c, len(h.arena)); err != nil {
		p.underWay.Add(-1)
		return 0, fmt.Errorf("peer %d: %w", p.id, err)
	}
	f := &flight{copy: c, peer: p, done: make(chan struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(p.tickets) >= MaxCopies {
		p.underWay.Add(-1)
		return 0, fmt.Errorf("peer %d: %d copies not done, at most %d: %w", p.id, len(p.tickets), MaxCopies, ErrBusy)
	}
	h.mu.last++
	h.mu.tickets[h.mu.last] = f
	p.tickets[h.mu.last] = struct{}{}
	if p.streams[c.Dir] == nil {
		p.streams[c.Dir] = startStream(h.arena)
	}
	p.streams[c.Dir].work <- f // has room for MaxCopies
	return h.mu.last, nil
}

// begin finds the peer and keeps it open: while a copy is under way, Close is ErrBusy.
func (h *Host) begin(c *Copy) (*peer, error) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	p, err := h.peerLocked(c.Peer)
	if err == nil {
		p.underWay.Add(1)
	}
	return p, err
}

// Done waits for a copy. With timeout 0 or less it only looks.
func (h *Host) Done(t Ticket, timeout time.Duration) (Done, bool, error) {
	h.mu.RLock()
	f := h.mu.tickets[t]
	h.mu.RUnlock()
	if f == nil {
		return Done{}, false, fmt.Errorf("ticket %d: %w", t, ErrTicket)
	}
	if !f.wait(timeout) {
		return Done{}, false, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.tickets[t] == nil { // another caller was faster
		return Done{}, false, fmt.Errorf("ticket %d: %w", t, ErrTicket)
	}
	delete(h.mu.tickets, t)
	delete(f.peer.tickets, t)
	return f.end, true, nil
}

func (f *flight) wait(timeout time.Duration) bool {
	select {
	case <-f.done:
		return true
	default:
	}
	if timeout <= 0 {
		return false
	}
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-f.done:
		return true
	case <-timer.C:
		return false
	}
}
