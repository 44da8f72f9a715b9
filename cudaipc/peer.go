package cudaipc

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Peer is a device's record of an imported peer. Its regions do not change between Import and
// Close; the device's lock guards tickets.
type Peer struct {
	ID          PeerID
	Pid         int
	pidfd       int  // -1: not watched
	FireOnDeath bool // its events, which are words, fire when its process dies
	Regions     map[RegionID]*Opened
	Words       []byte // the sync region; nil: no words
	sync        Sync
	Proof       int          // Import.Proof; 0: none
	underWay    atomic.Int32 // copies that are being checked, waiting or running
	tickets     map[Ticket]struct{}
}

func (p *Peer) base() *Peer { return p }

// Prepare makes a peer that has nothing open yet.
func (p *Peer) Prepare(im *Import) {
	p.ID, p.Pid, p.pidfd = im.Peer, im.Pid, -1
	p.Regions, p.tickets = map[RegionID]*Opened{}, map[Ticket]struct{}{}
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

// Dead reports whether the peer's process has ended; false if it is not watched. A reused process
// id cannot deceive it.
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
