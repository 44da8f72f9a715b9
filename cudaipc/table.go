package cudaipc

import (
	"fmt"
	"sync"
	"time"
)

// table is what a device knows of its peers, and of the copies that are under way or not asked for by Done.
type table struct {
	mu struct {
		sync.RWMutex
		peers   map[PeerID]*peer
		tickets tickets
		closed  bool
	}
}

var errClosed = fmt.Errorf("device closed: %w", ErrPeer)

func (t *table) init() {
	t.mu.peers = map[PeerID]*peer{}
}

func (t *table) add(p *peer) error {
	if p.id == AllPeers {
		return fmt.Errorf("the id stands for all peers: %w", ErrPeer)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return errClosed
	}
	if t.mu.peers[p.id] != nil {
		return fmt.Errorf("imported already: %w", ErrBusy)
	}
	t.mu.peers[p.id] = p
	return nil
}

// take removes peers from the tables, all or none of those asked for. From then on nobody can reach them. With force, copies
// that are under way do not keep them.
func (t *table) take(id PeerID, force bool) ([]*peer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil, errClosed
	}
	var closing []*peer
	for _, p := range t.mu.peers {
		if id != AllPeers && p.id != id {
			continue
		}
		if !force && p.underWay.Load() > 0 {
			return nil, fmt.Errorf("peer %d: %w", p.id, ErrBusy)
		}
		closing = append(closing, p)
	}
	if id != AllPeers && closing == nil {
		return nil, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	for _, p := range closing {
		delete(t.mu.peers, p.id)
		t.mu.tickets.forget(p)
	}
	t.mu.closed = id == AllPeers
	return closing, nil
}

// peerLocked finds a peer; t.mu is held, for reading at least.
func (t *table) peerLocked(id PeerID) (*peer, error) {
	if t.mu.closed {
		return nil, errClosed
	}
	p := t.mu.peers[id]
	if p == nil {
		return nil, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	return p, nil
}

// begin finds the peer and keeps it open: while a copy is under way, Close is ErrBusy.
func (t *table) begin(id PeerID) (*peer, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	p, err := t.peerLocked(id)
	if err == nil {
		p.underWay.Add(1)
	}
	return p, err
}

// enter gives a checked copy of a begun peer its ticket and hands it to submit, which must not wait: t.mu is held, so that
// the order of tickets is that of submission.
func (t *table) enter(p *peer, c *Copy, submit func(*flight)) (Ticket, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := &flight{copy: c, peer: p}
	ticket, err := t.mu.tickets.enter(f)
	if err != nil {
		p.underWay.Add(-1)
		return 0, err
	}
	submit(f)
	return ticket, nil
}

// Done waits for a copy. With timeout 0 or less it only looks.
func (t *table) Done(ticket Ticket, timeout time.Duration) (Done, bool, error) {
	return t.mu.tickets.ended(&t.mu.RWMutex, ticket, timeout)
}

// finish tells the end of a flight. Whoever sees it may close the peer at once.
func (f *flight) finish() {
	f.peer.underWay.Add(-1)
	close(f.done)
}
