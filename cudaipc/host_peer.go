package cudaipc

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// peer is one imported peer. Its regions do not change between Import and Close; tickets and streams are under
// Host.mu.
type peer struct {
	id          PeerID
	pid         int
	pidfd       int  // -1: not watched
	fireOnDeath bool // HostOptions.FireOnDeath
	regions     map[RegionID]*region
	words       []byte // the sync region; nil: no words
	sync        Sync
	underWay    atomic.Int32 // copies that are being checked, waiting or running
	tickets     map[Ticket]struct{}
	streams     [2]*stream // by Direction, nil until the first copy
	proof       int        // Import.Proof
	gpu         *gpuPeer   //nolint:nolintlint,unused // what is open on a GPU, with the build tag cuda; nil on the host device
}

// Import opens the regions of a peer, all or none. Every descriptor in it is closed when it returns: a mapping
// holds its file by itself.
func (h *Host) Import(im Import) error {
	defer closeDescriptors(im.Regions)
	p := newPeer(&im)
	p.fireOnDeath = h.onDeath
	err := p.open(&im)
	if err == nil {
		err = h.add(p)
	}
	if err != nil {
		p.close()
		return fmt.Errorf("peer %d: %w", im.Peer, err)
	}
	return nil
}

func newPeer(im *Import) *peer {
	return &peer{id: im.Peer, pid: im.Pid, pidfd: -1, proof: im.Proof, regions: map[RegionID]*region{}, tickets: map[Ticket]struct{}{}}
}

func (p *peer) open(im *Import) error {
	if len(im.Regions) > MaxRegions {
		return fmt.Errorf("%d regions, at most %d: %w", len(im.Regions), MaxRegions, ErrRange)
	}
	watch := p.fireOnDeath
	var total uint64
	for i := range im.Regions {
		r := &im.Regions[i]
		if p.regions[r.ID] != nil {
			return fmt.Errorf("region %d is there twice: %w", r.ID, ErrRange)
		}
		if err := im.gone(); err != nil {
			return err
		}
		opened, err := openRegion(r, im.Pid)
		if err != nil {
			return fmt.Errorf("region %d: %w", r.ID, err)
		}
		p.regions[r.ID] = opened
		if total += r.Size; total > MaxPeerBytes {
			return fmt.Errorf("region %d: more than %d bytes in all: %w", r.ID, int64(MaxPeerBytes), ErrRange)
		}
		watch = watch || r.Kind == KindPeer
	}
	if err := p.placeWords(im.Sync, EventCell); err != nil {
		return err
	}
	if watch && im.Pid > 0 {
		return p.watch()
	}
	return nil
}

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

// close ends the streams, which are idle, and unmaps. Nobody can reach the peer any more.
func (p *peer) close() {
	for _, s := range p.streams {
		if s != nil {
			s.close()
		}
	}
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

func closeDescriptors(regions []Region) {
	for i := range regions {
		r := &regions[i]
		if (r.Kind == KindFD || r.Kind == KindCUDAFD) && r.FD >= 0 {
			_ = unix.Close(r.FD)
		}
	}
}
