package mover

import "github.com/kvagent/kvagent/cudaipc"

// Poll answers each wait now. It reads the peers' words itself. It asks the mover for events of a
// GPU, in one message for all waits, and only if the step word has been reached: before that the
// answer does not depend on them.
func (m *Mover) Poll(waits []cudaipc.Wait, states []cudaipc.State) error {
	asked, at, proc, err := m.readWords(waits, states)
	if err != nil || len(asked) == 0 {
		return err
	}
	fired := make([]cudaipc.State, len(asked))
	if err := proc.poll(asked, fired); err != nil {
		return err
	}
	// The words are read after the event, so that an event seen as fired proves the step that was
	// written before it.
	again := make([]cudaipc.Wait, len(asked))
	for i, w := range asked {
		again[i] = w
		again[i].Event = cudaipc.None
	}
	seen := make([]cudaipc.State, len(asked))
	if _, _, _, err := m.readWords(again, seen); err != nil {
		return err
	}
	for i, to := range at {
		seen[i].Fired = fired[i].Fired
		states[to] = seen[i]
	}
	return nil
}

// readWords reads words, and returns the waits whose events have to be asked, with their indexes.
// All of them are of one mover.
func (m *Mover) readWords(waits []cudaipc.Wait, states []cudaipc.State) (asked []cudaipc.Wait, at []int, proc *process,
	err error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for i := range waits {
		w := waits[i]
		p, err := m.peerLocked(w.Peer)
		if err != nil {
			return nil, nil, nil, err
		}
		ask := p.asks && w.Event != cudaipc.None
		if ask {
			if err := p.view.CheckWait(&w); err != nil {
				return nil, nil, nil, err
			}
			w.Event = cudaipc.None
		}
		if err := p.view.Poll(&w, &states[i]); err != nil {
			return nil, nil, nil, err
		}
		if !ask {
			continue
		}
		if states[i].Step < w.Step {
			states[i].Fired = false
			continue
		}
		proc = p.process
		asked, at = append(asked, waits[i]), append(at, i)
	}
	return asked, at, proc, nil
}

// SetWord writes a word of a peer's sync region, which this side has mapped too.
func (m *Mover) SetWord(id cudaipc.PeerID, off, value uint64) error {
	m.mu.RLock()
	defer m.mu.RUnlock()
	p, err := m.peerLocked(id)
	if err != nil {
		return err
	}
	return p.view.SetWord(off, value)
}
