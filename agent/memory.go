package agent

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
)

// memory is the engines' memory that is open in the device.
type memory struct {
	device     cudaipc.Device
	mappings   *mappings    // the regions
	peers      *peerNumbers // the workers whose they are
	pendingFDs atomic.Int64 // descriptors of registrations that are not complete
	maxPending int64        // such descriptors at once
	log        *zap.Logger
}

// close closes a worker's regions. A copy that is still under way would be a worker that closed too early: the
// socket's end must not say what is not so, therefore this waits as long as it takes, and says so.
func (m *memory) close(st *seat) {
	pause := time.NewTicker(closeRetry)
	defer pause.Stop()
	said := false
	for {
		err := m.device.Close(st.peer)
		if err == nil {
			break
		}
		if !said {
			said = true
			m.log.Error("regions do not close", zap.String("instance", st.engine.instance), zap.Uint32("rank", st.rank), zap.Error(err))
		}
		if !errors.Is(err, cudaipc.ErrBusy) {
			return // the number is never used again, and the regions stay counted
		}
		<-pause.C
	}
	m.mappings.give(st.regions, st.bytes)
	m.peers.give(st.peer)
}

// closeRetry is the pause before regions with a copy under way are tried again.
const closeRetry = time.Millisecond

// peerNumbers gives numbers to the workers whose memory is open. A number is used again only after all others
// have been, and never while its regions are open.
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

// owner is the session of a number; nil: it is not used.
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
