package agent

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/share"
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// memory opens and closes the engines' memory in the device.
type memory struct {
	device     cudaipc.Device
	mappings   *share.Mappings // the regions
	peers      *peerNumbers    // the workers that own them
	pendingFDs atomic.Int64    // descriptors of registrations that are not complete
	maxPending int64           // such descriptors at once
	log        *zap.Logger
}

// close closes a worker's regions. A copy still in flight means that the worker was closed too
// early. The socket's end must prove that no memory is touched, so close logs that and waits as
// long as it takes.
func (m *memory) close(st *seat) {
	pause := time.NewTicker(closeRetry)
	defer pause.Stop()
	logged := false
	for {
		err := m.device.Close(st.peer)
		if err == nil {
			break
		}
		if !logged {
			logged = true
			m.log.Error("regions do not close", zap.String("instance", st.engine.instance), zap.Uint32("rank", st.rank),
				zap.Error(err))
		}
		if !errors.Is(err, cudaipc.ErrBusy) {
			return // the number is never used again, and the regions stay counted
		}
		<-pause.C
	}
	m.mappings.Give(st.regions, st.bytes)
	m.peers.give(st.peer)
}

// closeRetry is the pause between attempts to close regions with a copy in flight.
const closeRetry = time.Millisecond

// peerNumbers assigns numbers to the workers whose memory is open. A number is reused only after
// all others have been, and never while its regions are open.
type peerNumbers struct {
	mu   sync.Mutex
	last cudaipc.PeerID
	used map[cudaipc.PeerID]*session // whose memory it is
}

func newPeerNumbers() *peerNumbers { return &peerNumbers{used: make(map[cudaipc.PeerID]*session)} }

func (p *peerNumbers) take(s *session) cudaipc.PeerID {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		p.last++
		if _, taken := p.used[p.last]; !taken && p.last != cudaipc.AllPeers {
			p.used[p.last] = s
			return p.last
		}
	}
}

// owner returns the session of a number, or nil if it is not used.
func (p *peerNumbers) owner(id cudaipc.PeerID) *session {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used[id]
}

func (p *peerNumbers) give(id cudaipc.PeerID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, id)
}

// lostPeer ends the session of a worker whose memory was open in a mover that has ended. Its copies
// have ended; the engine receives the reason and registers again.
func (a *Agent) lostPeer(id cudaipc.PeerID, why error) {
	if s := a.memory.peers.owner(id); s != nil {
		s.terminate(endDevice, ipc.ErrCodeInternal,
			fmt.Errorf("the worker's memory is not open any more; register again: %w", why))
	}
}
