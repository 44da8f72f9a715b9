package cudaipc

import (
	"fmt"
	"sync"
	"time"
)

// tickets are the copies of a device that are under way or not asked for by Done. The device's lock guards them; it is held in all
// methods but ended.
type tickets struct {
	open map[Ticket]*flight
	last Ticket
}

// flight is a copy from its submission until Done has told its end.
type flight struct {
	copy  *Copy         // nil in a mover's books
	moved *movedCopy    // nil in all others
	peer  *peer         // that it is of
	done  chan struct{} // closed when end is there
	// Of a sample, which has no copy: what is to be summed, and until when.
	sample *Sample
	until  time.Time
	end    Done
}

// enter gives a copy its ticket.
func (t *tickets) enter(f *flight) (Ticket, error) {
	if n := len(f.peer.tickets); n >= MaxCopies {
		return 0, fmt.Errorf("peer %d: %d copies not done, at most %d: %w", f.peer.id, n, MaxCopies, ErrBusy)
	}
	f.done = make(chan struct{})
	if t.open == nil {
		t.open = map[Ticket]*flight{}
	}
	t.last++
	t.open[t.last] = f
	f.peer.tickets[t.last] = struct{}{}
	return t.last, nil
}

// forget drops the copies of a peer that is closed.
func (t *tickets) forget(p *peer) {
	for ticket := range p.tickets {
		delete(t.open, ticket)
	}
}

// ended waits for a copy and then forgets it. With timeout 0 or less it only looks. lock is the device's, and not held.
func (t *tickets) ended(lock *sync.RWMutex, ticket Ticket, timeout time.Duration) (Done, bool, error) {
	lock.RLock()
	f := t.open[ticket]
	lock.RUnlock()
	if f == nil {
		return Done{}, false, fmt.Errorf("ticket %d: %w", ticket, ErrTicket)
	}
	if !waitClosed(f.done, timeout) {
		return Done{}, false, nil
	}
	lock.Lock()
	defer lock.Unlock()
	if t.open[ticket] == nil { // another caller was faster
		return Done{}, false, fmt.Errorf("ticket %d: %w", ticket, ErrTicket)
	}
	delete(t.open, ticket)
	delete(f.peer.tickets, ticket)
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
