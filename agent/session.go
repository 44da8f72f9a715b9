package agent

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/connlimit"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/lookup"
)

// session is one session socket, with three goroutines: run owns it, waits for its end, tears it
// down and joins the other two; the reader serves what the peer asks for; the writer empties the
// outbox.
type session struct {
	owner  *sessions
	conn   *ipc.Conn
	log    *zap.Logger
	number uint64
	place  *connlimit.Place
	pid    int
	out    *outbox
	jobs   jobTable

	greeted  atomic.Bool          // HELLO was received: version and software are set
	software string               // set before greeted
	seat     atomic.Pointer[seat] // nil: not registered

	// Held by the reader while it serves a message, and by teardown afterwards.
	mu struct {
		sync.Mutex
		ended bool
		reg   *registering // parts are still expected
	}

	closing sync.Once
	ending  chan struct{} // closed to end the session
	end     end           // the reason; readable once ending is closed
}

// end is why a session ends.
type end struct {
	reason string // one of endReasons
	code   uint8  // of the ERROR sent before the socket ends; 0: none is sent
	detail error
	seen   time.Time
}

// Reasons for the end of a session, as labels of its counter.
const (
	endPeer      = "peer"      // the peer ended it, or died
	endHandshake = "handshake" // no HELLO, or no common version
	endMalformed = "malformed" // the peer sent a malformed message
	endLimit     = "limit"     // too many sessions, or parts that did not come in time
	endSlow      = "slow"      // the peer did not read, or left a frame unfinished
	endShutdown  = "shutdown"  // the agent ends
	endDevice    = "device"    // the process that had the peer's memory open was lost
)

var endReasons = [...]string{endPeer, endHandshake, endMalformed, endLimit, endSlow, endShutdown, endDevice}

// terminate ends the session. Only the first call counts.
func (s *session) terminate(reason string, code uint8, detail error) {
	s.closing.Do(func() {
		s.end = end{reason: reason, code: code, detail: detail, seen: time.Now()}
		close(s.ending)
	})
}

// run serves a session from accept to the close of its socket.
func (s *session) run() {
	var joins sync.WaitGroup
	written := make(chan struct{})
	joins.Go(s.read)
	joins.Go(func() {
		defer close(written)
		s.write()
	})
	select {
	case <-s.conn.Dead():
		s.lost(s.conn.Cause())
	case <-s.ending:
	}
	s.teardown(written)
	joins.Wait()
	s.owner.forget(s)
}

// read serves messages until the session ends.
func (s *session) read() {
	if err := s.greet(); err != nil {
		s.terminate(endHandshake, 0, err)
		return
	}
	s.place.Set(connlimit.Held)
	for {
		msg, fds, err := s.conn.Recv()
		if err == nil {
			err = s.serve(msg, fds)
		}
		if err != nil {
			s.lost(err)
			return
		}
		s.conn.Served()
	}
}

// greet negotiates a version and sends the session the switches.
func (s *session) greet() error {
	hello, err := ipc.ServeHandshake(s.conn, ipc.Welcome{
		Boot: s.owner.boot, Session: s.number, MaxFrame: ipc.MaxFrame, MaxJobBlocks: ipc.MaxJobBlocks,
		MaxQueue: uint32(s.owner.cfg.Limits.Transfer.Queue), LeaseBytes: uint64(s.owner.cfg.LeaseBytes),
		Peer: s.owner.cfg.PeerAddress,
	})
	if err != nil {
		return err
	}
	s.software = hello.Software
	s.owner.welcome(s)
	return nil
}

// lost ends the session because of an error of its socket, or of a message. The reader, the writer
// and run may each call it first, so the reason depends only on the error.
func (s *session) lost(why error) {
	switch {
	case !s.greeted.Load():
		s.terminate(endHandshake, 0, why)
	case errors.As(why, new(*ipc.MalformedError)):
		s.terminate(endMalformed, ipc.ErrCodeMalformed, why)
	case errors.Is(why, ipc.ErrStalled):
		s.terminate(endSlow, ipc.ErrCodeLimit, why)
	case errors.Is(why, os.ErrDeadlineExceeded): // of a write
		s.terminate(endSlow, 0, why)
	default:
		s.terminate(endPeer, 0, why)
	}
}

// unexpected returns the error for a well-formed message that is not allowed now.
func unexpected(message, field, format string, args ...any) error {
	return &ipc.MalformedError{Message: message, Field: field,
		Detail: fmt.Sprintf(format, args...)}
}

// serve executes one message; only REGIONS carries descriptors. An error ends the session.
func (s *session) serve(msg any, fds []int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.ended {
		registration.CloseFDs(fds)
		return ipc.ErrClosed
	}
	switch m := msg.(type) {
	case *ipc.Register:
		return s.registerLocked(m)
	case *ipc.Regions:
		s.regionsLocked(m, fds)
	case *ipc.Segments:
		s.segmentsLocked(m)
	case *ipc.Unregister:
		s.unregisterLocked(m)
	case *ipc.Release:
		s.release(m)
	case *ipc.Save:
		return s.save(m)
	case *ipc.Load:
		return s.load(m)
	case *ipc.Stages:
		return s.declareStages(m)
	case *ipc.StagedLoad:
		return s.stagedLoad(m)
	case *ipc.Cancel:
		s.cancel(m)
	case *ipc.Reset:
		s.reset(m)
	case *ipc.Steps:
		s.steps(m)
	case *ipc.Budget:
		return s.setBudget(m)
	case *ipc.Ping:
		s.answer(&ipc.Pong{Req: m.Req})
	default:
		if s.owner.guests.Serve(s.number, s.rules(), msg, len(s.out.waiting), s.notify) {
			return nil
		}
		return unexpected("message", "type", "%T, allowed: a message that a client sends after HELLO", msg)
	}
	return nil
}

// rules returns the open space of the session's registration; nil: none.
func (s *session) rules() *lookup.Space {
	if st := s.seat.Load(); st != nil {
		return st.space.open.Load()
	}
	return nil
}

// answer queues the answer to a request of the peer, which was served with it: the peer may rely on
// that as soon as it has the answer. It waits while the outbox is more than half full. Only the
// reader calls it.
func (s *session) answer(m any) {
	s.conn.Served()
	for len(s.out.waiting) >= cap(s.out.waiting)/2 {
		select {
		case <-s.out.room:
		case <-s.ending:
			return
		}
	}
	s.notify(m)
}

// notify queues an unsolicited message. A peer whose outbox is full counts as dead.
func (s *session) notify(m any) {
	if !s.out.push(m) {
		s.terminate(endSlow, 0, fmt.Errorf("the peer does not read: %d messages wait", cap(s.out.waiting)))
	}
}

// notifyGreeted notifies a session of a change once HELLO was received. The connection drops
// messages that the session's version does not have.
func (s *session) notifyGreeted(m any) {
	if s.greeted.Load() {
		s.notify(m)
	}
}

// write sends the outbox's messages in order until it is closed and empty. A write that times out
// ends the session and drops the remaining messages.
func (s *session) write() {
	for {
		var m any
		select {
		case m = <-s.out.waiting:
		case <-s.out.closed:
			select {
			case m = <-s.out.waiting:
			default:
				return
			}
		}
		if err := s.conn.Send(m); err != nil {
			s.lost(err)
			return
		}
		signal(s.out.room)
	}
}

// cancel serves CANCEL. A running job's DONE is sent when the worker has fenced it, and the answer
// right after it. An unknown job has ended already or never existed, and is answered at once.
func (s *session) cancel(m *ipc.Cancel) {
	if !s.jobs.cancel(m.Job) {
		s.answer(&ipc.Cancelled{Job: m.Job})
		return
	}
	st := s.seat.Load()
	if st == nil {
		return // UNREGISTER ended it, and its DONE will be sent
	}
	if w := st.worker.Load(); !st.held.cancel(m.Job) && w != nil {
		w.Cancel(m.Job)
	}
}

// release serves RELEASE. It ends leases of the session's own engine by their serial numbers.
func (s *session) release(m *ipc.Release) {
	st := s.seat.Load()
	ended := 0
	if st != nil {
		ended = s.owner.ledger.Release(st.engine.acct, m.Leases)
	}
	s.owner.metrics.LeasesUnknown.Add(uint64(len(m.Leases) - ended))
}

// reset serves RESET: it starts a new weights epoch of the session's space and notifies all its
// other sessions.
func (s *session) reset(m *ipc.Reset) {
	st := s.seat.Load()
	if st == nil {
		s.answer(&ipc.ResetDone{Req: m.Req, Status: ipc.RegRefused, Text: "the session has no registration"})
		return
	}
	epoch, err := s.owner.resetSpace(st.space, s, fmt.Sprintf("instance %q", st.engine.instance))
	if err != nil {
		s.answer(&ipc.ResetDone{Req: m.Req, Status: ipc.RegRefused, Text: err.Error()})
		return
	}
	s.answer(&ipc.ResetDone{Req: m.Req, Status: ipc.RegDone, Epoch: epoch})
}

// outbox is the bounded queue of messages to one session. Completions and notices never wait; an
// overflow means that the peer does not read. Answers to the peer's own requests wait while it is
// more than half full, which slows down a peer that asks faster than it reads, and leaves room for
// completions.
type outbox struct {
	waiting chan any
	room    chan struct{} // cap 1: a message was written
	closed  chan struct{} // once no further message is written
}

func newOutbox(limit int) *outbox {
	return &outbox{make(chan any, limit), make(chan struct{}, 1), make(chan struct{})}
}

// push adds a message without waiting. It returns false if the queue is full.
func (o *outbox) push(m any) bool {
	select {
	case o.waiting <- m:
		return true
	default:
		return false
	}
}
