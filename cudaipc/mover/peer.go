package mover

import (
	"errors"
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
)

// clientPeer is a peer whose regions are open in a mover. Mover.mu guards all but view and asks.
type clientPeer struct {
	// view has the sizes of the regions, to check runs by, and the mapped sync words.
	view    *cudaipc.Peer
	asks    bool // its events are asked in the mover
	process *process

	opening, closing bool
	lost             error // why its mover was lost; nil: it was not

	// Copies in the mover by lane, and since which tick none of them has ended.
	pending [lanesPerPeer]int
	since   [lanesPerPeer]int64
}

// Import opens the regions of a peer in the mover, all or none.
func (m *Mover) Import(im cudaipc.Import) error {
	defer im.CloseAll()
	if im.Peer == cudaipc.AllPeers {
		return fmt.Errorf("peer %d stands for all peers: %w", im.Peer, cudaipc.ErrPeer)
	}
	p, err := m.reserve(&im)
	if err != nil {
		return err
	}
	proc, err := m.aliveFor(&im)
	if err == nil {
		err = proc.importPeer(&im)
	}
	if gone := im.CheckCancelled(); err == nil && gone != nil {
		err = errors.Join(gone, proc.closePeer(im.Peer))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil && proc.over {
		err = proc.err()
	}
	if err != nil {
		delete(m.mu.peers, im.Peer)
		p.view.Close()
		return err
	}
	p.process, p.opening = proc, false
	return nil
}

// reserve takes a peer's number and maps what this side needs of it.
func (m *Mover) reserve(im *cudaipc.Import) (*clientPeer, error) {
	view, err := viewPeer(im)
	if err != nil {
		return nil, fmt.Errorf("peer %d: %w", im.Peer, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.closed {
		err = cudaipc.ErrClosed
	} else if m.mu.peers[im.Peer] != nil {
		err = fmt.Errorf("peer %d is imported already: %w", im.Peer, cudaipc.ErrBusy)
	}
	if err != nil {
		view.Close()
		return nil, err
	}
	p := &clientPeer{view: view, opening: true, asks: m.opts.AskEvents || im.OnGPU()}
	m.mu.peers[im.Peer] = p
	return p, nil
}

// viewPeer makes the agent's view of a peer. The device checks the other regions.
func viewPeer(im *cudaipc.Import) (*cudaipc.Peer, error) {
	p := &cudaipc.Peer{}
	err := p.Prepare(im)
	if err == nil {
		err = viewRegions(p, im)
	}
	if err == nil && im.Pid > 0 {
		_ = p.Watch() // the device reports a process that is not there
	}
	if err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// viewRegions notes the sizes of a peer's regions, and maps the one that its words are in.
func viewRegions(p *cudaipc.Peer, im *cudaipc.Import) error {
	cell := uint64(cudaipc.EventCell)
	if im.OnGPU() {
		cell = cudaipc.CUDAEventCell
	}
	for i := range im.Regions {
		r := &im.Regions[i]
		if len(r.Handle) > maxHandle {
			return fmt.Errorf("region %d: handle of %d bytes, at most %d: %w", r.ID, len(r.Handle), maxHandle,
				cudaipc.ErrRange)
		}
		if have := p.Regions[r.ID]; have != nil {
			have.Size += r.Size // a further piece
			continue
		}
		p.Regions[r.ID] = &cudaipc.Opened{Size: r.Size}
		if s := im.Sync; s == nil || *s == (cudaipc.Sync{}) || s.Region != r.ID || r.Kind != cudaipc.KindFD {
			continue
		}
		mem, err := cudaipc.MapFD(r.FD, int64(r.Size))
		if err != nil {
			return fmt.Errorf("region %d: %w", r.ID, err)
		}
		p.Regions[r.ID].Mem = mem
	}
	return p.PlaceWords(im.Sync, cell)
}
