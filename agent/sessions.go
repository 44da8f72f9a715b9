package agent

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/connlimit"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/peercred"
)

// sessions holds the agent's open session sockets, and the goroutines that serve them.
type sessions struct {
	*Agent
	places *connlimit.Limit

	mu      sync.Mutex
	last    uint64 // number of the newest session, see firstSession
	open    map[uint64]*session
	closed  bool
	serving sync.WaitGroup
}

// firstSession returns the number before an agent's first session. It is random, so that a late
// look-up meant for an earlier agent does not reserve for a session of this one. Numbers stay below
// 2^53, which JSON represents exactly.
func firstSession(boot [16]byte) uint64 { return binary.LittleEndian.Uint64(boot[:]) >> 12 }

// acceptPause is the pause after an accept that failed with a system error.
const acceptPause = 50 * time.Millisecond

// accept serves the session socket until the listener is closed.
func (all *sessions) accept(l *ipc.SessionListener) {
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			all.rare.Error("session not accepted", zap.Error(err))
			time.Sleep(acceptPause)
		default:
			all.admitConn(conn)
		}
	}
}

// refused counts and logs a peer that is not allowed to connect.
func (all *sessions) refused(peer peercred.Cred, err error) {
	all.metrics.Registrations[report.ResultKeptOut].Add(1)
	all.log.Warn("session refused", zap.Int("pid", peer.Pid), zap.Error(err))
}

// admitConn starts a session, or ends it at once if there are too many.
func (all *sessions) admitConn(conn *ipc.Conn) {
	s := &session{
		owner: all, conn: conn, pid: conn.Peer().Pid, out: newOutbox(all.cfg.Limits.Outbox),
		ending: make(chan struct{}),
	}
	var err error
	s.place, err = all.places.Enter(connlimit.User(conn.Peer().Uid, uint32(os.Geteuid())), func() {
		s.terminate(endLimit, ipc.ErrCodeLimit, errors.New("sessions: it gave way to another user"))
	})
	all.mu.Lock()
	if err != nil || all.closed {
		all.mu.Unlock()
		err = fmt.Errorf("sessions: %w", cmp.Or(err, errShutdown))
		all.refused(conn.Peer(), err)
		// the first send to a socket does not block
		_ = conn.Send(&ipc.Error{Code: ipc.ErrCodeLimit, Text: err.Error()})
		_ = conn.Close()
		return
	}
	all.last++
	s.number = all.last
	s.log = all.log.With(zap.Uint64("session", s.number), zap.Int("pid", s.pid))
	all.open[s.number] = s
	all.serving.Go(s.run)
	all.mu.Unlock()
}

// forget removes a session that has ended.
func (all *sessions) forget(s *session) {
	all.mu.Lock()
	defer all.mu.Unlock()
	delete(all.open, s.number)
	s.place.Leave()
}

// list returns all sessions in the order of their connection.
func (all *sessions) list() []*session {
	all.mu.Lock()
	defer all.mu.Unlock()
	out := make([]*session, 0, len(all.open))
	for _, one := range all.open {
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b *session) int { return cmp.Compare(a.number, b.number) })
	return out
}

// jobs returns how many jobs of all sessions run.
func (all *sessions) jobs() (n int) {
	for _, one := range all.list() {
		n += one.jobs.count()
	}
	return n
}

// end terminates all sessions, waits until they are torn down, and prevents new ones.
func (all *sessions) end(reason string, code uint8, why error) {
	all.mu.Lock()
	all.closed = true
	all.mu.Unlock()
	for _, one := range all.list() {
		one.terminate(reason, code, why)
	}
	all.serving.Wait()
}

// switches turn loads and saves off and on at run time. mu orders changes and their notices, so
// that the last notice a session gets is current.
type switches struct {
	mu           sync.Mutex
	loads, saves atomic.Bool
	drained      atomic.Bool // no new jobs, no look-ups, until the end
}

func (s *switches) draining() bool { return s.drained.Load() }

// set switches loads and saves; nil leaves one as it is. It notifies every session.
func (all *sessions) set(loads, saves *bool) report.SwitchState {
	all.switches.mu.Lock()
	defer all.switches.mu.Unlock()
	before := all.switches.state()
	if loads != nil {
		all.switches.loads.Store(*loads)
	}
	if saves != nil {
		all.switches.saves.Store(*saves)
	}
	now := all.switches.state()
	if now == before {
		return now
	}
	all.log.Info("switched", zap.Bool("loads", now.Loads), zap.Bool("saves", now.Saves))
	for _, s := range all.list() {
		s.notifyGreeted(switchesMessage(now))
	}
	return now
}

func (s *switches) state() report.SwitchState {
	return report.SwitchState{Loads: s.loads.Load(), Saves: s.saves.Load()}
}

func switchesMessage(s report.SwitchState) *ipc.Switches {
	return &ipc.Switches{Loads: s.Loads, Saves: s.Saves}
}

// welcome sends the switches to a session that has negotiated a version.
func (all *sessions) welcome(s *session) {
	all.switches.mu.Lock()
	defer all.switches.mu.Unlock()
	s.greeted.Store(true)
	s.notifyGreeted(switchesMessage(all.switches.state()))
}
