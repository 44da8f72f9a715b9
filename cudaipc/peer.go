package cudaipc

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Table holds the peers of a device, and its copies and samples that are in flight or not taken by
// Done. P is a peer with the device's additions.
type Table[P anyPeer] struct {
	mu struct {
		sync.RWMutex
		peers   map[PeerID]P
		flights map[Ticket]*Flight
		last    Ticket
		closed  bool
	}
}

type anyPeer interface{ base() *Peer }

// ErrClosed is the error of every call after Close(AllPeers).
var ErrClosed = fmt.Errorf("device closed: %w", ErrPeer)

// Init makes a table ready.
func (t *Table[P]) Init() {
	t.mu.peers, t.mu.flights = map[PeerID]P{}, map[Ticket]*Flight{}
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
		if !force && p.base().underWay.Load() > 0 {
			return nil, fmt.Errorf("peer %d: %w", other, ErrBusy)
		}
		closing = append(closing, p)
	}
	if id != AllPeers && closing == nil {
		return nil, fmt.Errorf("peer %d: %w", id, ErrPeer)
	}
	for _, p := range closing {
		delete(t.mu.peers, p.base().ID)
		for ticket := range p.base().tickets {
			delete(t.mu.flights, ticket)
		}
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
	if err := p.base().lostLocked(); err != nil {
		return p, fmt.Errorf("peer %d: %w", id, err)
	}
	return p, nil
}

// All returns all peers.
func (t *Table[P]) All() []P {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Collect(maps.Values(t.mu.peers))
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

// Copy checks a copy, gives it a ticket and passes it to submit, which must not wait: the table is
// locked, so that tickets have the order of submission.
func (t *Table[P]) Copy(c *Copy, arena int64, submit func(P, *Flight)) (Ticket, error) {
	return t.enter(c.Peer, &Flight{Copy: c}, func(p *Peer) error { return p.CheckCopy(c, arena) }, submit)
}

// Sum does the same with a sample.
func (t *Table[P]) Sum(s *Sample, submit func(P, *Flight)) (Ticket, error) {
	f := &Flight{Sample: s, until: time.Now().Add(s.Within)}
	return t.enter(s.Peer, f, func(p *Peer) error { return p.CheckSample(s) }, submit)
}

func (t *Table[P]) enter(id PeerID, f *Flight, check func(*Peer) error, submit func(P, *Flight)) (Ticket, error) {
	p, err := t.hold(id)
	if err != nil {
		return 0, err
	}
	f.peer, f.done = p.base(), make(chan struct{})
	err = check(f.peer)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		err = f.peer.lostLocked()
	}
	if n := len(f.peer.tickets); err == nil && n >= MaxCopies {
		err = fmt.Errorf("%d copies not done, at most %d: %w", n, MaxCopies, ErrBusy)
	}
	if err != nil {
		f.peer.underWay.Add(-1)
		return 0, fmt.Errorf("peer %d: %w", id, err)
	}
	t.mu.last++
	t.mu.flights[t.mu.last] = f
	f.peer.tickets[t.mu.last] = struct{}{}
	submit(p, f)
	return t.mu.last, nil
}

// hold finds a peer and keeps it open: while it is held, Close is ErrBusy.
func (t *Table[P]) hold(id PeerID) (P, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	p, err := t.PeerLocked(id)
	if err == nil {
		p.base().underWay.Add(1)
	}
	return p, err
}

// Done waits for a copy. With timeout 0 or less it does not wait.
func (t *Table[P]) Done(ticket Ticket, timeout time.Duration) (Done, bool, error) {
	t.mu.RLock()
	f := t.mu.flights[ticket]
	t.mu.RUnlock()
	if f != nil && !ClosesWithin(f.done, timeout) {
		return Done{}, false, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f == nil || t.mu.flights[ticket] == nil { // another caller may be faster
		return Done{}, false, fmt.Errorf("ticket %d: %w", ticket, ErrTicket)
	}
	delete(t.mu.flights, ticket)
	delete(f.peer.tickets, ticket)
	return f.End, true, nil
}

// Finish ends the copy of a ticket as another process says that it has ended, after a call of
// ending: once it has ended, its caller may use the memory of the copy again.
func (t *Table[P]) Finish(ticket Ticket, d Done, ending func(P, *Flight)) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.mu.flights[ticket]
	if f == nil || f.ended() {
		return fmt.Errorf("end of copy %d, which is not in flight: %w", ticket, ErrTicket)
	}
	blocks, sums := f.blocks()
	if (d.Bad != nil && len(d.Bad) != blocks) || (d.Bad != nil) != (d.Err != nil) || (sums && len(d.Sums) != blocks) {
		return fmt.Errorf("end of copy %d: %d bad, %d sums of %d blocks: %w", ticket, len(d.Bad), len(d.Sums),
			blocks, ErrRange)
	}
	ending(t.mu.peers[f.peer.ID], f)
	f.End = d
	f.Finish()
	return nil
}

// Lose ends the copies of some peers, with bad blocks, and returns the peers: all their calls but
// Close fail from then on.
func (t *Table[P]) Lose(lost func(P) bool, why error) (all []P) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, p := range t.mu.peers {
		if lost(p) {
			p.base().lost = why
			all = append(all, p)
		}
	}
	for _, f := range t.mu.flights {
		if f.peer.lost != nil && !f.ended() {
			blocks, sums := f.blocks()
			f.End = AllBad(blocks, sums, f.peer.lost)
			f.Finish()
		}
	}
	return all
}

// Flight is a copy or a sample, from its submission until Done has reported its end.
type Flight struct {
	Copy   *Copy // nil: a sample
	Sample *Sample
	End    Done
	peer   *Peer
	until  time.Time     // of a sample
	done   chan struct{} // closed when End is set
}

// Finish ends a flight. A caller that sees the end may close the peer at once.
func (f *Flight) Finish() {
	f.peer.underWay.Add(-1)
	close(f.done)
}

func (f *Flight) ended() bool { return ClosesWithin(f.done, 0) }

// blocks returns how many blocks a flight has, and whether they are summed.
func (f *Flight) blocks() (n int, sums bool) {
	if f.Copy != nil {
		return len(f.Copy.Blocks), f.Copy.Sum
	}
	return len(f.Sample.Blocks), true
}

// AllBad returns the end of a copy of which nothing arrived.
func AllBad(blocks int, sums bool, err error) Done {
	d := Done{Err: err, Bad: slices.Repeat([]bool{true}, blocks)}
	if sums {
		d.Sums = make([]uint32, blocks)
	}
	return d
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
// Close; the table's lock guards tickets and lost.
type Peer struct {
	ID       PeerID
	Pid      int
	pidfd    int // -1: not watched
	Regions  map[RegionID]*Opened
	Words    []byte // the sync region; nil: no words
	sync     Sync
	Proof    int          // Import.Proof; 0: none
	lost     error        // why calls fail; nil: they do not
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

// lostLocked returns why a peer is lost. The table's lock is held.
func (p *Peer) lostLocked() error {
	if p.lost == nil {
		return nil
	}
	return fmt.Errorf("%w: %w", p.lost, ErrPeer)
}

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
