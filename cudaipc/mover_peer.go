package cudaipc

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// movedPeer is a peer whose regions are open in a mover. All but view and asks is under Mover.mu.
type movedPeer struct {
	// view is what this side has of the peer: sizes of regions, by which runs are checked, and the sync words, mapped.
	view *peer
	asks bool // its events are asked in the mover
	life *moverLife

	opening, closing bool
	lost             error // why its mover is gone; nil: it is not

	// Copies in the mover by Direction, and since which tick of the life none of them has ended.
	pending [2]int
	since   [2]int64
}

// Import opens the regions of a peer in the mover, all or none.
func (m *Mover) Import(im Import) error {
	defer closeImport(&im)
	if im.Peer == AllPeers {
		return fmt.Errorf("peer %d stands for all peers: %w", im.Peer, ErrPeer)
	}
	p, err := m.seat(&im)
	if err != nil {
		return err
	}
	life, err := m.aliveFor(&im)
	if err == nil {
		err = life.importPeer(&im)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil && life.over {
		err = life.err()
	}
	if err != nil {
		delete(m.mu.peers, im.Peer)
		p.view.close()
		return err
	}
	p.life, p.opening = life, false
	return nil
}

// seat takes a peer's number, and maps what this side needs of it.
func (m *Mover) seat(im *Import) (*movedPeer, error) {
	view, err := viewPeer(im, m.opts.FireOnDeath)
	if err != nil {
		return nil, fmt.Errorf("peer %d: %w", im.Peer, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.closed {
		err = errClosed
	} else if m.mu.peers[im.Peer] != nil {
		err = fmt.Errorf("peer %d is imported already: %w", im.Peer, ErrBusy)
	}
	if err != nil {
		view.close()
		return nil, err
	}
	p := &movedPeer{view: view, opening: true, asks: m.opts.AskEvents || im.onGPU()}
	m.mu.peers[im.Peer] = p
	return p, nil
}

// onGPU says whether a peer has GPU memory, and so a GPU's events.
func (im *Import) onGPU() bool {
	for i := range im.Regions {
		if k := im.Regions[i].Kind; k == KindCUDA || k == KindCUDAFD {
			return true
		}
	}
	return false
}

// viewPeer makes the agent's view of a peer. What is wrong with the rest of the regions is for the device to say.
func viewPeer(im *Import, fireOnDeath bool) (*peer, error) {
	if len(im.Regions) > MaxRegions {
		return nil, fmt.Errorf("%d regions, at most %d: %w", len(im.Regions), MaxRegions, ErrRange)
	}
	p := &peer{id: im.Peer, pid: im.Pid, pidfd: -1, regions: map[RegionID]*region{}, tickets: map[Ticket]struct{}{}}
	err := p.view(im)
	if err == nil && im.Pid > 0 {
		p.fireOnDeath = fireOnDeath && !im.onGPU()
		if dead := p.watch(); p.fireOnDeath {
			err = dead // else the device says it
		}
	}
	if err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *peer) view(im *Import) error {
	cell := uint64(EventCell)
	if im.onGPU() {
		cell = CUDAEventCell
	}
	var total uint64
	for i := range im.Regions {
		r := &im.Regions[i]
		if len(r.Handle) > maxMoverHandle {
			return fmt.Errorf("region %d: handle of %d bytes, at most %d: %w", r.ID, len(r.Handle), maxMoverHandle, ErrRange)
		}
		if r.Size == 0 || r.Size > MaxPeerBytes-total {
			return fmt.Errorf("region %d: %d bytes behind %d, allowed: 1 to %d in all: %w", r.ID, r.Size, total, int64(MaxPeerBytes), ErrRange)
		}
		total += r.Size
		if err := p.viewRegion(im, i); err != nil {
			return fmt.Errorf("region %d: %w", r.ID, err)
		}
	}
	return p.placeWords(im.Sync, cell)
}

// viewRegion notes the size of region i, and maps it if the words are in it.
func (p *peer) viewRegion(im *Import, i int) error {
	r := &im.Regions[i]
	if have := p.regions[r.ID]; have != nil {
		if before := &im.Regions[i-1]; r.Kind != KindCUDAFD || before.Kind != KindCUDAFD || before.ID != r.ID {
			return fmt.Errorf("it is there twice: %w", ErrRange)
		}
		have.size += r.Size // a further piece
		return nil
	}
	p.regions[r.ID] = &region{size: r.Size}
	if s := im.Sync; s == nil || *s == (Sync{}) || s.Region != r.ID || r.Kind != KindFD {
		return nil
	}
	opened, err := openRegion(r, im.Pid)
	if err == nil {
		p.regions[r.ID] = opened
	}
	return err
}

// closeImport closes every descriptor of an import.
func closeImport(im *Import) {
	closeDescriptors(im.Regions)
	if im.Proof > 0 {
		_ = unix.Close(im.Proof)
	}
}
