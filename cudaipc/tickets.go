package cudaipc

import (
	"fmt"
	"sync"
	"time"
)

// Tickets are the copies of a device that are in flight or not taken by Done. The device's lock
// guards them and is held in all methods but Await. F is a flight with the device's additions.
type Tickets[F anyFlight] struct {
	Open map[Ticket]F
	last Ticket
}

type anyFlight interface{ base() *Flight }

// Flight is a copy or a sample, from its submission until Done has reported its end.
type Flight struct {
	peer *Peer
	done chan struct{} // closed when End is set
	End  Done
}

func (f *Flight) base() *Flight { return f }

// Finish ends a flight. A caller that sees the end may close the peer at once.
func (f *Flight) Finish() {
	f.peer.Release()
	close(f.done)
}

// Enter gives a copy of a peer its ticket.
func (t *Tickets[F]) Enter(p *Peer, f F) (Ticket, error) {
	if n := len(p.tickets); n >= MaxCopies {
		return 0, fmt.Errorf("peer %d: %d copies not done, at most %d: %w", p.ID, n, MaxCopies, ErrBusy)
	}
	b := f.base()
	b.peer, b.done = p, make(chan struct{})
	if t.Open == nil {
		t.Open = map[Ticket]F{}
	}
	t.last++
	t.Open[t.last] = f
	p.tickets[t.last] = struct{}{}
	return t.last, nil
}

// Forget drops the copies of a closed peer.
func (t *Tickets[F]) Forget(p *Peer) {
	for ticket := range p.tickets {
		delete(t.Open, ticket)
	}
}

// Await waits for a copy and drops its ticket. With timeout 0 or less it does not wait. lock is
// the device's and must not be held.
func (t *Tickets[F]) Await(lock *sync.RWMutex, ticket Ticket, timeout time.Duration) (Done, bool, error) {
	lock.RLock()
	open, found := t.Open[ticket]
	lock.RUnlock()
	if !found {
		return Done{}, false, fmt.Errorf("ticket %d: %w", ticket, ErrTicket)
	}
	f := open.base()
	if !waitClosed(f.done, timeout) {
		return Done{}, false, nil
	}
	lock.Lock()
	defer lock.Unlock()
	if _, found = t.Open[ticket]; !found { // another caller was faster
		return Done{}, false, fmt.Errorf("ticket %d: %w", ticket, ErrTicket)
	}
	delete(t.Open, ticket)
	delete(f.peer.tickets, ticket)
	return f.End, true, nil
}

// MarkBad notes that block i of n did not arrive. Err keeps the first reason.
func (d *Done) MarkBad(i, n int, err error) {
	if d.Bad == nil {
		d.Bad = make([]bool, n)
		d.Err = err
	}
	d.Bad[i] = true
}

// waitClosed waits for a channel to be closed. With timeout 0 or less it does not wait.
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
