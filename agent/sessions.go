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
	"github.com/kvagent/kvagent/agent/lease"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// sessions are the session sockets that are open, the goroutines that serve them, and what they serve from.
type sessions struct {
	boot       [16]byte
	dir        string // of look-up sockets
	limits     *Limits
	most       int   // at once
	leaseBytes int64 // cap of one engine's leases
	log        *zap.Logger

	registry *registry
	ledger   *lease.Ledger
	tiers    pool.Tiers // nil: none
	sockets  *lookupSockets
	epochs   *epochs
	workers  *workers
	memory   *memory
	inflight *inflight
	switches *switches
	metrics  *admin.Metrics

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
func (all *sessions) accept(l *ipc.SessionListener, stop <-chan struct{}) {
	for {
		conn, err := l.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			all.log.Error("session not accepted", zap.Error(err))
			pause := time.NewTimer(acceptPause)
			select {
			case <-pause.C:
			case <-stop:
				pause.Stop()
			}
		default:
			all.admitConn(conn)
		}
	}
}

// refused counts and logs a peer that may not connect.
func (all *sessions) refused(peer ipc.Cred, err error) {
	all.metrics.SessionsRefused.Add(1)
	all.log.Warn("session refused", zap.Int("pid", peer.Pid), zap.Error(err))
}

// admitConn starts a session, or ends it at once if there are too many.
func (all *sessions) admitConn(conn *ipc.Conn) {
	all.mu.Lock()
	if n := len(all.open); all.closed || n >= all.most {
		all.mu.Unlock()
		err := fmt.Errorf("sessions: %d are open, allowed: %d", n, all.most)
		all.refused(conn.Peer(), err)
		_ = conn.Send(&ipc.Error{Code: ipc.ErrCodeLimit, Text: err.Error()}) // to a socket that nothing was sent to
		_ = conn.Close()
		return
	}
	s := &session{
		owner: all, conn: conn, pid: conn.Peer().Pid, out: newOutbox(all.limits.Outbox), gone: make(chan struct{}),
	}
	all.last++
	s.number = all.last
	s.log = all.log.With(zap.Uint64("session", s.number), zap.Int("pid", s.pid))
	all.open[s.number] = s
	all.serving.Go(s.run)
	all.mu.Unlock()
}

// forget takes a session that has ended off the list.
func (all *sessions) forget(s *session) {
	all.mu.Lock()
	defer all.mu.Unlock()
	delete(all.open, s.number)
}

// list returns all sessions, in the order they came.
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

// end dooms all sessions and waits until they are torn down. No session starts any more.
func (all *sessions) end(reason string, code uint8, why error) {
	all.mu.Lock()
	all.closed = true
	all.mu.Unlock()
	for _, one := range all.list() {
		one.doom(reason, code, why)
	}
	all.serving.Wait()
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

// set switches loads and saves; nil leaves one as it is. Every session is told.
func (all *sessions) set(loads, saves *bool) admin.SwitchState {
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
func (all *sessions) welcome(s *session) {
	all.switches.mu.Lock()
	defer all.switches.mu.Unlock()
	s.greeted.Store(true)
	s.tell(switchesMessage(all.switches.state()))
}
