package agent

import (
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

// lastWords is how long the end of a session waits for its last messages to be written. All that the session
// held is given back by then.
const lastWords = 200 * time.Millisecond

// teardown ends a session, whatever state it is in. The socket goes last: its end is what proves to the engine
// that none of its memory is, or will be, touched. written is closed when the writer has ended.
func (s *session) teardown(written <-chan struct{}) {
	registered := s.takeApart()
	if s.end.code != 0 {
		s.out.push(&ipc.Error{Code: s.end.code, Text: cutText(s.end.detail.Error())})
	}
	s.out.close()
	limit := time.NewTimer(lastWords)
	defer limit.Stop()
	select {
	case <-written:
	case <-limit.C: // the peer does not read, or there is much to write: Close cuts it off
	}
	if err := s.conn.Close(); err != nil {
		s.log.Debug("session socket", zap.Error(err)) // the peer is gone or told: nobody to hear of it
	}
	s.note(registered, time.Since(s.end.seen))
}

// takeApart waits for the reader to be done with its message, and undoes what the session registered.
func (s *session) takeApart() (registered bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.ended = true
	st := s.seat.Load()
	if s.mu.reg != nil { // in the middle of a registration
		s.abandonLocked()
	} else if st != nil {
		s.agent.vacate(st)
		s.seat.Store(nil)
	}
	return st != nil
}

// note counts and logs the end of a session; took is the time from when it was seen to the close of the socket.
func (s *session) note(registered bool, took time.Duration) {
	s.agent.metrics.SessionEnds[s.end.reason].Add(1)
	if registered {
		s.agent.metrics.Cleanup.Observe(took.Seconds())
		s.agent.metrics.CleanupMax.Show(took)
	}
	level := zap.InfoLevel
	if s.end.reason != endPeer && s.end.reason != endShutdown {
		level = zap.WarnLevel
	}
	s.log.Log(level, "session ended", zap.String("reason", s.end.reason), zap.NamedError("detail", s.end.detail),
		zap.Bool("registered", registered), zap.Duration("cleanup", took))
}

// vacate takes a registration apart. The order is what makes it safe:
//  1. look-ups do not see the seat any more: nobody is promised what cannot be loaded;
//  2. loads that are held for lower tiers end, and the worker is closed: its jobs are cancelled and its copies have ended, which the device asks for;
//  3. the device closes the regions: nothing of the engine is mapped any more;
//  4. the leases go, so that what they pinned can be evicted;
//  5. the look-up socket goes if no other engine names it;
//  6. the seat is free for a successor, and the peer's number with it.
func (a *Agent) vacate(st *seat) {
	a.registry.leave(st)
	st.held.close()
	if w := st.worker.Load(); w != nil {
		w.Close()
	}
	if st.regions > 0 {
		a.closePeer(st)
	}
	a.ledger.CloseHolder(st.holder)
	a.sockets.drop(st)
	a.registry.vacate(st)
}

// closePeer closes a worker's regions. A copy that is still under way would be a worker that closed too early: the
// socket's end must not say what is not so, therefore this waits as long as it takes, and says so.
func (a *Agent) closePeer(st *seat) {
	pause := time.NewTicker(closeRetry)
	defer pause.Stop()
	said := false
	for {
		err := a.device.Close(st.peer)
		if err == nil {
			break
		}
		if !said {
			said = true
			a.log.Error("regions do not close", zap.String("instance", st.engine.instance), zap.Uint32("rank", st.rank), zap.Error(err))
		}
		if !errors.Is(err, cudaipc.ErrBusy) {
			return // the number is never used again, and the regions stay counted
		}
		<-pause.C
	}
	a.mappings.give(st.regions, st.bytes)
	a.peers.give(st.peer)
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

// unregisterLocked serves UNREGISTER: its answer says that nothing of the engine's memory is touched any more.
func (s *session) unregisterLocked(m *ipc.Unregister) {
	switch st := s.seat.Load(); {
	case s.mu.reg != nil:
		left := s.mu.reg.Left
		s.abandonLocked()
		s.mu.passed = left
	case st != nil:
		s.agent.vacate(st)
		s.seat.Store(nil)
		s.log.Info("unregistered", zap.String("instance", st.engine.instance))
	default:
		s.answer(&ipc.Unregistered{Req: m.Req, Status: ipc.RegRefused, Text: "the session has no registration"})
		return
	}
	s.answer(&ipc.Unregistered{Req: m.Req, Status: ipc.RegDone})
}
