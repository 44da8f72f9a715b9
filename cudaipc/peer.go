package cudaipc

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// peer is what every device keeps of an imported peer. Its regions do not change between Import and Close; tickets are under the
// device's lock.
type peer struct {
	id          PeerID
	pid         int
	pidfd       int  // -1: not watched
	fireOnDeath bool // its events, which are words, fire when its process dies
	regions     map[RegionID]*region
	words       []byte // the sync region; nil: no words
	sync        Sync
	proof       int          // Import.Proof; 0: none
	underWay    atomic.Int32 // copies that are being checked, waiting or running
	tickets     map[Ticket]struct{}
}

func (p *peer) base() *peer { return p }

// prepare makes a peer that has nothing open yet.
func (p *peer) prepare(im *Import) {
	p.id, p.pid, p.pidfd = im.Peer, im.Pid, -1
	p.regions, p.tickets = map[RegionID]*region{}, map[Ticket]struct{}{}
}

// hold keeps a peer open until release: while it is held, Close is ErrBusy.
func (p *peer) hold()      { p.underWay.Add(1) }
func (p *peer) release()   { p.underWay.Add(-1) }
func (p *peer) busy() bool { return p.underWay.Load() > 0 }

// placeWords finds the words that s names, with cells of cell bytes for its events.
func (p *peer) placeWords(s *Sync, cell uint64) error {
	if s == nil || *s == (Sync{}) {
		return nil
	}
	r := p.regions[s.Region]
	if r == nil {
		return fmt.Errorf("sync: region %d is not there: %w", s.Region, ErrRange)
	}
	if r.mem == nil {
		return fmt.Errorf("sync: region %d is not a descriptor to map: %w", s.Region, ErrKind)
	}
	if err := s.check(r.size, cell); err != nil {
		return err
	}
	p.words, p.sync = r.mem, *s
	return nil
}

func (p *peer) watch() error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return fmt.Errorf("process %d: %w", p.pid, err)
	}
	p.pidfd = fd
	return nil
}

var errPeerDead = errors.New("the peer's process has ended")

// dead says whether the peer's process has ended; false if it is not watched. A process id that was given to
// another process cannot deceive it.
func (p *peer) dead() bool {
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

// close unmaps. Nobody can reach the peer any more.
func (p *peer) close() {
	for _, r := range p.regions {
		r.close()
	}
	if p.pidfd >= 0 {
		_ = unix.Close(p.pidfd)
	}
	if p.proof > 0 {
		_ = unix.Close(p.proof) // last: from now on nobody touches the peer's memory
	}
}
