package agent

import (
	"time"

	"go.uber.org/zap"

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
		s.owner.vacate(st)
		s.seat.Store(nil)
	}
	return st != nil
}

// note counts and logs the end of a session; took is the time from when it was seen to the close of the socket.
func (s *session) note(registered bool, took time.Duration) {
	s.owner.metrics.SessionEnds[s.end.reason].Add(1)
	if registered {
		s.owner.metrics.Cleanup.Observe(took.Seconds())
		s.owner.metrics.CleanupMax.Show(took)
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
func (all *sessions) vacate(st *seat) {
	all.registry.leave(st)
	st.held.close()
	if w := st.worker.Load(); w != nil {
		w.Close()
	}
	if st.regions > 0 {
		all.memory.close(st)
	}
	all.ledger.CloseHolder(st.holder)
	all.sockets.drop(st)
	all.registry.vacate(st)
}

// unregisterLocked serves UNREGISTER: its answer says that nothing of the engine's memory is touched any more.
func (s *session) unregisterLocked(m *ipc.Unregister) {
	switch st := s.seat.Load(); {
	case s.mu.reg != nil:
		left := s.mu.reg.Left
		s.abandonLocked()
		s.mu.passed = left
	case st != nil:
		s.owner.vacate(st)
		s.seat.Store(nil)
		s.log.Info("unregistered", zap.String("instance", st.engine.instance))
	default:
		s.answer(&ipc.Unregistered{Req: m.Req, Status: ipc.RegRefused, Text: "the session has no registration"})
		return
	}
	s.answer(&ipc.Unregistered{Req: m.Req, Status: ipc.RegDone})
}
