package cudaipc

import (
	"fmt"
	"sync/atomic"
)

// Poll answers each wait now. It stops at the first that cannot be answered.
func (h *Host) Poll(waits []Wait, states []State) error {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for i := range waits {
		p, err := h.peerLocked(waits[i].Peer)
		if err == nil {
			err = p.poll(&waits[i], &states[i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *peer) poll(w *Wait, s *State) error {
	if err := p.checkWait(w); err != nil {
		return err
	}
	*s = State{Fired: true}
	if p.words == nil {
		return nil
	}
	if err := p.pollWords(w, s); err != nil {
		return err
	}
	if !s.Fired && p.fireOnDeath && p.dead() {
		s.Fired = true
	}
	return nil
}

func (p *peer) checkWait(w *Wait) error {
	if (w.Event != None && w.Event >= p.sync.Events) || (w.Revoke != None && w.Revoke >= p.sync.Revokes) {
		return fmt.Errorf("event %d of %d, revocation word %d of %d: %w",
			w.Event, p.sync.Events, w.Revoke, p.sync.Revokes, ErrRange)
	}
	return nil
}

// pollWords reads a peer's words, which may go away under the hand.
func (p *peer) pollWords(w *Wait, s *State) error {
	err := guarded(p.words, p.words, func() { p.read(w, s) })
	if err != nil {
		return fmt.Errorf("peer %d: sync words: %w: %w", p.id, err, ErrPeer)
	}
	return nil
}

// read takes the event before the step word: an event seen as fired then proves the step that was written
// before it.
func (p *peer) read(w *Wait, s *State) {
	if w.Event != None {
		s.Fired = fired(p.words, p.sync.EventsOff+uint64(w.Event)*EventCell)
	}
	s.Step = atomic.LoadUint64(word64(p.words, p.sync.StepOff))
	if w.Revoke != None {
		s.Revoked = atomic.LoadUint32(word32(p.words, p.sync.RevokeOff+uint64(w.Revoke)*4)) != 0
	}
}
