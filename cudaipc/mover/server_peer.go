package mover

import (
	"encoding/json"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
)

var errNoSetup = fmt.Errorf("the mover has no device: %w", cudaipc.ErrPeer)

// setup opens the device; the arena's descriptor comes with it.
func (s *server) setup(f *fields, number uint64, fds []int) error {
	var m Setup
	err := json.Unmarshal(f.rest, &m)
	if err != nil || len(fds) != 1 {
		closeAll(fds)
		return fmt.Errorf("setup with %d descriptors: %w: %w", len(fds), errWire, err)
	}
	m.ArenaFD = fds[0]
	s.running.Go(func() {
		defer func() { _ = unix.Close(m.ArenaFD) }()
		s.answer(number, s.openDevice(m))
	})
	return nil
}

func (s *server) openDevice(m Setup) error {
	d, err := s.open(m)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.device != nil {
		return errors.Join(fmt.Errorf("set up already: %w", cudaipc.ErrBusy), d.Close(cudaipc.AllPeers))
	}
	s.mu.device = d
	if l, ok := d.(loser); ok {
		s.running.Go(func() { s.watch(l) })
	}
	return nil
}

// loser is a device that notices its own loss.
type loser interface {
	Lost() <-chan struct{} // closed then
	LostBy() error         // ErrLost and its cause; nil before
}

// watch reports the loss of a device. The failing call reports it too; the first report counts,
// and both have the reason.
func (s *server) watch(d loser) {
	select {
	case <-d.Lost():
		s.lost(d.LostBy())
	case <-s.ending:
	}
}

func (s *server) startImport(f *fields, number uint64, fds []int) error {
	im, err := takeImport(f, fds)
	if err != nil {
		// A process that can have no more descriptors gets fewer than were sent: the agent
		// is not at fault.
		closeAll(fds)
		s.answer(number, fmt.Errorf("%d descriptors arrived: %w", len(fds), err))
		return nil
	}
	im.Cancelled = s.beginImport(number)
	s.running.Go(func() {
		err := s.importPeer(im)
		s.stopImport(number)
		s.answer(number, err)
	})
	return nil
}

func (s *server) beginImport(number uint64) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	gone := make(chan struct{})
	s.mu.imports[number] = gone
	return gone
}

// stopImport cancels an import, if it is in flight.
func (s *server) stopImport(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopImportLocked(number)
}

func (s *server) stopImportLocked(number uint64) {
	if gone := s.mu.imports[number]; gone != nil {
		delete(s.mu.imports, number)
		close(gone)
	}
}

// importPeer keeps the proof itself, so that devices need not handle it.
func (s *server) importPeer(im cudaipc.Import) error {
	p := &servedPeer{id: im.Peer, proof: im.Proof}
	im.Proof = 0
	d := s.device()
	if d == nil {
		im.CloseRegions()
		p.closeProof()
		return errNoSetup
	}
	if err := d.Import(im); err != nil {
		p.closeProof()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.peers[p.id] = p // was not there: the device would have refused
	return nil
}

// closePeer closes a peer, or with AllPeers the device. It changes nothing if the device refuses.
func (s *server) closePeer(id cudaipc.PeerID) error {
	d := s.device()
	if d == nil {
		return nil
	}
	if err := d.Close(id); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.mu.peers {
		if id == cudaipc.AllPeers || p.id == id {
			delete(s.mu.peers, p.id)
			p.endLanes()
			p.closeProof()
		}
	}
	if id == cudaipc.AllPeers {
		s.mu.device = nil
	}
	return nil
}

func (p *servedPeer) endLanes() {
	for i, l := range p.lanes {
		if l != nil {
			close(l.submit)
			p.lanes[i] = nil
		}
	}
}

func (p *servedPeer) closeProof() {
	if p.proof > 0 {
		_ = unix.Close(p.proof)
	}
}
