package cudaipc

import (
	"fmt"
	"sync"
	"time"
)

// tickets are the copies of a device that are under way or not asked for by Done. The device's lock guards them; it is held in all
// methods but ended. F is a flight with what the device keeps beside it.
type tickets[F anyFlight] struct {
	open map[Ticket]F
	last Ticket
}

type anyFlight interface{ base() *flight }

// flight is a copy, or a sample, from its submission until Done has told its end.
type flight struct {
	peer *peer         // that it is of
	done chan struct{} // closed when end is there
	end  Done
}

func (f *flight) base() *flight { return f }

// finish tells the end of a flight. Whoever sees it may close the peer at once.
func (f *flight) finish() {
	f.peer.release()
	close(f.done)
}

// enter gives a copy of a peer its ticket.
func (t *tickets[F]) enter(p *peer, f F) (Ticket, error) {
	if n := len(p.tickets); n >= MaxCopies {
		return 0, fmt.Errorf("peer %d: %d copies not done, at most %d: %w", p.id, n, MaxCopies, ErrBusy)
	}
	b := f.base()
	b.peer, b.done = p, make(chan struct{})
	if t.open == nil {
		t.open = map[Ticket]F{}
	}
	t.last++
	t.open[t.last] = f
	p.tickets[t.last] = struct{}{}
	return t.last, nil
}

// forget drops the copies of a peer that is closed.
func (t *tickets[F]) forget(p *peer) {
	for ticket := range p.tickets {
		delete(t.open, ticket)
	}
}

// ended waits for a copy and then forgets it. With timeout 0 or less it only looks. lock is the device's, and not held.
func (t *tickets[F]) ended(lock *sync.RWMutex, ticket Ticket, timeout time.Duration) (Done, bool, error) {
	lock.RLock()
	open, known := t.open[ticket]
	lock.RUnlock()
	if !known {
		return Done{}, false, fmt.Errorf("ticket %d: %w", ticket, ErrTicket)
	}
	f := open.base()
	if !waitClosed(f.done, timeout) {
		return Done{}, false, nil
	}
	lock.Lock()
	defer lock.Unlock()
	if _, known = t.open[ticket]; !known { // another caller was faster
		return Done{}, false, fmt.Errorf("ticket %d: %w", ticket, ErrTicket)
	}
	delete(t.open, ticket)
	delete(f.peer.tickets, ticket)
	return f.end, true, nil
}

// bad notes that block i of n did not arrive. The first reason is the one that is told.
func (d *Done) bad(i, n int, err error) {
	if d.Bad == nil {
		d.Bad = make([]bool, n)
		d.Err = err
	}
	d.Bad[i] = true
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
