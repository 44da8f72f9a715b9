package cudaipc

import (
	"fmt"
	"sync"
	"time"
)

// table is what a device knows of its peers, and of the copies that are under way or not asked for by Done. P is a peer with what
// the device keeps beside it.
type table[P anyPeer] struct {
	mu struct {
		sync.RWMutex
		peers   map[PeerID]P
		tickets tickets[*flight]
		closed  bool
	}
}

type anyPeer interface{ base() *peer }

var errClosed = fmt.Errorf("device closed: %w", ErrPeer)

func (t *table[P]) init() {
	t.mu.peers = map[PeerID]P{}
}

func (t *table[P]) add(p P) error {
	id := p.base().id
	if id == AllPeers {
		return fmt.Errorf("the id stands for all peers: %w", ErrPeer)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return errClosed
	}
	if _, known := t.mu.peers[id]; known {
		return fmt.Errorf("imported already: %w", ErrBusy)
	}
	t.mu.peers[id] = p
	return nil
}

// take removes peers from the tables, all or none of those asked for. From then on nobody can reach them. With force, copies
// that are under way do not keep them.
func (t *table[P]) take(id PeerID, force bool) ([]P, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil, errClosed
	}
	var closing []P
	for other, p := range t.mu.peers {
		if id != AllPeers && other != id {
			continue
		}
		if !force && p.base().busy() {
			return nil, fmt.Errorf("peer %d: %w", other, ErrBusy)
		}
		closing = append(closing, p)
	}
	if id != AllPeers && closing == nil {
		return nil, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	for _, p := range closing {
		delete(t.mu.peers, p.base().id)
		t.mu.tickets.forget(p.base())
	}
	t.mu.closed = id == AllPeers
	return closing, nil
}

// rLock keeps all peers from being closed until rUnlock.
func (t *table[P]) rLock()   { t.mu.RLock() }
func (t *table[P]) rUnlock() { t.mu.RUnlock() }

// peerLocked finds a peer; rLock is held.
func (t *table[P]) peerLocked(id PeerID) (p P, err error) {
	if t.mu.closed {
		return p, errClosed
	}
	p, known := t.mu.peers[id]
	if !known {
		return p, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	return p, nil
}

// begin finds the peer and keeps it open: while a copy is under way, Close is ErrBusy.
func (t *table[P]) begin(id PeerID) (P, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	p, err := t.peerLocked(id)
	if err == nil {
		p.base().hold()
	}
	return p, err
}

// enter gives a checked copy of a begun peer its ticket and hands it to submit, which must not wait: t.mu is held, so that
// the order of tickets is that of submission.
func (t *table[P]) enter(p P, submit func(*flight)) (Ticket, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := &flight{}
	ticket, err := t.mu.tickets.enter(p.base(), f)
	if err != nil {
		p.base().release()
		return 0, err
	}
	submit(f)
	return ticket, nil
}

// enterSample checks a sample, gives it its ticket, and hands it to submit, which must not wait.
func (t *table[P]) enterSample(s *Sample, submit func(P, *summing)) (Ticket, error) {
	p, err := t.begin(s.Peer)
	if err != nil {
		return 0, err
	}
	if err = p.base().checkSample(s); err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		f := &summing{flight: &flight{}, sample: s, until: time.Now().Add(s.Within)}
		var ticket Ticket
		if ticket, err = t.mu.tickets.enter(p.base(), f.flight); err == nil {
			submit(p, f)
			return ticket, nil
		}
	}
	p.base().release()
	return 0, fmt.Errorf("peer %d: %w", s.Peer, err)
}

// done waits for a copy. With timeout 0 or less it only looks.
func (t *table[P]) done(ticket Ticket, timeout time.Duration) (Done, bool, error) {
	return t.mu.tickets.ended(&t.mu.RWMutex, ticket, timeout)
}
