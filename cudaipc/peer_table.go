package cudaipc

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Table holds the peers of a device, and its copies that are in flight or not taken by Done. P is
// a peer with the device's additions.
type Table[P anyPeer] struct {
	mu struct {
		sync.RWMutex
		peers   map[PeerID]P
		tickets Tickets[*Flight]
		closed  bool
	}
}

type anyPeer interface{ base() *Peer }

// ErrClosed is the error of every call after Close(AllPeers).
var ErrClosed = fmt.Errorf("device closed: %w", ErrPeer)

// Init makes a table ready.
func (t *Table[P]) Init() {
	t.mu.peers = map[PeerID]P{}
}

// Add registers an imported peer.
func (t *Table[P]) Add(p P) error {
	id := p.base().ID
	if id == AllPeers {
		return fmt.Errorf("the id stands for all peers: %w", ErrPeer)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return ErrClosed
	}
	if _, found := t.mu.peers[id]; found {
		return fmt.Errorf("imported already: %w", ErrBusy)
	}
	t.mu.peers[id] = p
	return nil
}

// Take removes the named peers, or with AllPeers all: all or none of them. Afterwards no call
// reaches them. Unless force is set, it returns ErrBusy while a copy of one is in flight.
func (t *Table[P]) Take(id PeerID, force bool) ([]P, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.closed {
		return nil, ErrClosed
	}
	var closing []P
	for other, p := range t.mu.peers {
		if id != AllPeers && other != id {
			continue
		}
		if !force && p.base().Busy() {
			return nil, fmt.Errorf("peer %d: %w", other, ErrBusy)
		}
		closing = append(closing, p)
	}
	if id != AllPeers && closing == nil {
		return nil, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	for _, p := range closing {
		delete(t.mu.peers, p.base().ID)
		t.mu.tickets.Forget(p.base())
	}
	t.mu.closed = id == AllPeers
	return closing, nil
}

// RLock keeps all peers from being closed until RUnlock.
func (t *Table[P]) RLock() { t.mu.RLock() }

// RUnlock ends RLock.
func (t *Table[P]) RUnlock() { t.mu.RUnlock() }

// PeerLocked finds a peer. RLock must be held.
func (t *Table[P]) PeerLocked(id PeerID) (p P, err error) {
	if t.mu.closed {
		return p, ErrClosed
	}
	p, found := t.mu.peers[id]
	if !found {
		return p, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	return p, nil
}

// SetWord writes a word of a peer's sync region.
func (t *Table[P]) SetWord(id PeerID, off, value uint64) error {
	t.mu.RLock()
	defer t.mu.RUnlock()
	p, err := t.PeerLocked(id)
	if err != nil {
		return err
	}
	return p.base().SetWord(off, value)
}

// Begin finds a peer and holds it: while a copy is in flight, Close is ErrBusy.
func (t *Table[P]) Begin(id PeerID) (P, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	p, err := t.PeerLocked(id)
	if err == nil {
		p.base().Hold()
	}
	return p, err
}

// Enter gives a checked copy of a begun peer its ticket and passes it to submit, which must not
// wait: t.mu is held, so that tickets have the order of submission.
func (t *Table[P]) Enter(p P, submit func(*Flight)) (Ticket, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := &Flight{}
	ticket, err := t.mu.tickets.Enter(p.base(), f)
	if err != nil {
		p.base().Release()
		return 0, err
	}
	submit(f)
	return ticket, nil
}

// EnterSample checks a sample, gives it a ticket and passes it to submit, which must not wait.
func (t *Table[P]) EnterSample(s *Sample, submit func(P, *Summing)) (Ticket, error) {
	p, err := t.Begin(s.Peer)
	if err != nil {
		return 0, err
	}
	if err = p.base().CheckSample(s); err == nil {
		t.mu.Lock()
		defer t.mu.Unlock()
		f := &Summing{Flight: &Flight{}, sample: s, until: time.Now().Add(s.Within)}
		var ticket Ticket
		if ticket, err = t.mu.tickets.Enter(p.base(), f.Flight); err == nil {
			submit(p, f)
			return ticket, nil
		}
	}
	p.base().Release()
	return 0, fmt.Errorf("peer %d: %w", s.Peer, err)
}

// Done waits for a copy. With timeout 0 or less it does not wait.
func (t *Table[P]) Done(ticket Ticket, timeout time.Duration) (Done, bool, error) {
	return t.mu.tickets.Await(&t.mu.RWMutex, ticket, timeout)
}

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
	if !ClosesWithin(f.done, timeout) {
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

// ClosesWithin waits for a channel to be closed. With timeout 0 or less it does not wait.
func ClosesWithin(c <-chan struct{}, timeout time.Duration) bool {
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

// Peer is a device's record of an imported peer. Its regions do not change between Import and
// Close; the device's lock guards tickets.
type Peer struct {
	ID       PeerID
	Pid      int
	pidfd    int // -1: not watched
	Regions  map[RegionID]*Opened
	Words    []byte // the sync region; nil: no words
	sync     Sync
	Proof    int          // Import.Proof; 0: none
	underWay atomic.Int32 // copies that are being checked, waiting or running
	tickets  map[Ticket]struct{}
}

func (p *Peer) base() *Peer { return p }

// Prepare makes a peer that has nothing open yet, and checks what does not depend on the device.
func (p *Peer) Prepare(im *Import) error {
	p.ID, p.Pid, p.pidfd = im.Peer, im.Pid, -1
	p.Regions, p.tickets = map[RegionID]*Opened{}, map[Ticket]struct{}{}
	return im.check()
}

// Hold keeps a peer open until Release: while it is held, Close is ErrBusy.
func (p *Peer) Hold() { p.underWay.Add(1) }

// Release ends one Hold.
func (p *Peer) Release() { p.underWay.Add(-1) }

// Busy reports whether the peer is held.
func (p *Peer) Busy() bool { return p.underWay.Load() > 0 }

// PlaceWords finds the words that s names, with event cells of cell bytes.
func (p *Peer) PlaceWords(s *Sync, cell uint64) error {
	if s == nil || *s == (Sync{}) {
		return nil
	}
	r := p.Regions[s.Region]
	if r == nil {
		return fmt.Errorf("sync: region %d is not there: %w", s.Region, ErrRange)
	}
	if r.Mem == nil {
		return fmt.Errorf("sync: region %d is not a descriptor to map: %w", s.Region, ErrKind)
	}
	if err := s.check(r.Size, cell); err != nil {
		return err
	}
	p.Words, p.sync = r.Mem, *s
	return nil
}

// Watch opens a descriptor that reports the end of the peer's process.
func (p *Peer) Watch() error {
	fd, err := unix.PidfdOpen(p.Pid, 0)
	if err != nil {
		return fmt.Errorf("process %d: %w", p.Pid, err)
	}
	p.pidfd = fd
	return nil
}

// ErrPeerDead is the error of a copy with a process that has ended.
var ErrPeerDead = errors.New("the peer's process has ended")

// Dead reports whether the peer's process, not a reused number, has ended; false: not watched.
func (p *Peer) Dead() bool {
	if p.pidfd < 0 {
		return false
	}
	fds := []unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 0)
		if !errors.Is(err, unix.EINTR) {
			return n > 0 || err != nil
		}
	}
}

// Close closes the regions. No call reaches the peer any more.
func (p *Peer) Close() {
	for _, r := range p.Regions {
		r.Close()
	}
	if p.pidfd >= 0 {
		_ = unix.Close(p.pidfd)
	}
	if p.Proof > 0 {
		_ = unix.Close(p.Proof) // last: the proof that the peer's memory is not touched any more
	}
}
