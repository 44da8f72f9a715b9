package agent

import (
	"fmt"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// lostPeer ends the session of a worker whose memory was open in a mover that has ended. Its copies
// have ended; the engine receives the reason and registers again.
func (a *Agent) lostPeer(id cudaipc.PeerID, why error) {
	if s := a.memory.peers.owner(id); s != nil {
		s.terminate(endDevice, ipc.ErrCodeInternal,
			fmt.Errorf("the worker's memory is not open any more; register again: %w", why))
	}
}
