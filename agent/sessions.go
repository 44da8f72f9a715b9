package agent

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
)

// sessions are the session sockets that are open, and the goroutines that serve them.
type sessions struct {
	mu      sync.Mutex
	last    uint64 // number of the newest session, see firstSession
	open    map[uint64]*session
	closed  bool
	serving sync.WaitGroup
}

// firstSession is where the numbers of sessions start in a life of the agent: a look-up that was asked of another life and
// comes late must not reserve for a session of this one. Numbers stay below 2^53, which JSON can tell.
func firstSession(boot [16]byte) uint64 { return binary.LittleEndian.Uint64(boot[:]) >> 12 }

// acceptPause is the pause after an accept that failed for a reason of the system's.
const acceptPause = 50 * time.Millisecond

// accept serves the session socket until the listener is closed.
func (a *Agent) accept() {
	for {
		conn, err := a.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			a.log.Error("session not accepted", zap.Error(err))
			pause := time.NewTimer(acceptPause)
			select {
			case <-pause.C:
			case <-a.stop:
				pause.Stop()
			}
		default:
			a.admitConn(conn)
		}
	}
}

// refused counts and logs a peer that may not connect.
func (a *Agent) refused(peer ipc.Cred, err error) {
	a.metrics.SessionsRefused.Add(1)
	a.log.Warn("session refused", zap.Int("pid", peer.Pid), zap.Error(err))
}

// admitConn starts a session, or ends it at once if there are too many.
func (a *Agent) admitConn(conn *ipc.Conn) {
	a.sessions.mu.Lock()
	if n := len(a.sessions.open); a.sessions.closed || n >= a.share.sessions {
		a.sessions.mu.Unlock()
		err := fmt.Errorf("sessions: %d are open, allowed: %d", n, a.share.sessions)
		a.refused(conn.Peer(), err)
		_ = conn.Send(&ipc.Error{Code: ipc.ErrCodeLimit, Text: err.Error()}) // to a socket that nothing was sent to
		_ = conn.Close()
		return
	}
	s := &session{
		agent: a, conn: conn, pid: conn.Peer().Pid, out: newOutbox(a.cfg.Limits.Outbox), gone: make(chan struct{}),
	}
	a.sessions.last++
	s.number = a.sessions.last
	s.log = a.log.With(zap.Uint64("session", s.number), zap.Int("pid", s.pid))
	a.sessions.open[s.number] = s
	a.sessions.serving.Go(s.run)
	a.sessions.mu.Unlock()
}

// forget takes a session that has ended off the list.
func (a *Agent) forget(s *session) {
	a.sessions.mu.Lock()
	defer a.sessions.mu.Unlock()
	delete(a.sessions.open, s.number)
}

// all sessions, in the order they came.
func (s *sessions) all() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*session, 0, len(s.open))
	for _, one := range s.open {
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b *session) int { return cmp.Compare(a.number, b.number) })
	return out
}

// end dooms all sessions and waits until they are torn down. No session starts any more.
func (s *sessions) end(reason string, code uint8, why error) {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	for _, one := range s.all() {
		one.doom(reason, code, why)
	}
	s.serving.Wait()
}

// switches turn loads and saves off and on at run time, without touching an engine. mu orders changes with the
// notices of them, so that the last notice a session gets is true.
type switches struct {
	mu           sync.Mutex
	loads, saves atomic.Bool
	drained      atomic.Bool // no new jobs, no look-ups, until the end
}

func newSwitches() *switches {
	s := &switches{}
	s.loads.Store(true)
	s.saves.Store(true)
	return s
}

func (s *switches) draining() bool { return s.drained.Load() }

// Set switches loads and saves; nil leaves one as it is. Every session is told.
func (a *Agent) Set(loads, saves *bool) admin.SwitchState {
	a.switches.mu.Lock()
	defer a.switches.mu.Unlock()
	before := a.switches.state()
	if loads != nil {
		a.switches.loads.Store(*loads)
	}
	if saves != nil {
		a.switches.saves.Store(*saves)
	}
	now := a.switches.state()
	if now == before {
		return now
	}
	a.log.Info("switched", zap.Bool("loads", now.Loads), zap.Bool("saves", now.Saves))
	for _, s := range a.sessions.all() {
		s.tell(switchesMessage(now))
	}
	return now
}

func (s *switches) state() admin.SwitchState {
	return admin.SwitchState{Loads: s.loads.Load(), Saves: s.saves.Load()}
}

func switchesMessage(s admin.SwitchState) *ipc.Switches {
	return &ipc.Switches{Loads: s.Loads, Saves: s.Saves}
}

// welcome tells a session that has agreed on a version what is switched on.
func (a *Agent) welcome(s *session) {
	a.switches.mu.Lock()
	defer a.switches.mu.Unlock()
	s.greeted.Store(true)
	s.tell(switchesMessage(a.switches.state()))
}
