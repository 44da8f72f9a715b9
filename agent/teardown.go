package agent

import (
	"errors"
	"io"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
)

// flushLimit bounds the wait for a session's last messages to be written. Everything the session
// held is released before.
const flushLimit = 200 * time.Millisecond

// teardown ends a session in any state. It closes the socket last: the socket's end proves to the
// engine that none of its memory is or will be touched. written is closed when the writer has
// ended.
func (s *session) teardown(written <-chan struct{}) {
	s.mu.Lock() // once the reader has finished its message
	s.mu.ended = true
	registered := s.seat.Load() != nil
	s.leaveLocked()
	s.mu.Unlock()
	if s.end.code != 0 {
		s.out.push(&ipc.Error{Code: s.end.code, Text: s.end.detail.Error()})
	}
	close(s.out.closed)
	limit := time.NewTimer(flushLimit)
	defer limit.Stop()
	select {
	case <-written:
	case <-limit.C: // the peer is slow or does not read: Close drops the rest
	}
	if err := s.conn.Close(); err != nil {
		s.log.Debug("session socket", zap.Error(err)) // the peer has ended or was notified: nothing else to do
	}
	s.recordEnd(registered, time.Since(s.end.seen))
}

// recordEnd counts and logs the end of a session; took is the time from the detection of the end to
// the close of the socket.
func (s *session) recordEnd(registered bool, took time.Duration) {
	s.owner.metrics.SessionEnds[s.end.reason].Add(1)
	if registered {
		s.owner.metrics.Cleanup.Observe(took.Seconds())
		s.owner.metrics.CleanupMax.Observe(took)
	}
	level := zap.InfoLevel
	looked := s.end.reason == endHandshake && errors.Is(s.end.detail, io.EOF) // whether an agent answers
	if s.end.reason != endPeer && s.end.reason != endShutdown && !looked {
		level = zap.WarnLevel
	}
	s.log.Log(level, "session ended", zap.String("reason", s.end.reason), zap.NamedError("detail", s.end.detail),
		zap.Bool("registered", registered), zap.Duration("cleanup", took))
}

// vacate undoes a registration. It is safe because of this order:
//  1. look-ups no longer see the seat, and promise nothing that cannot be loaded;
//  2. held loads end, and the worker is closed: its jobs are cancelled and its copies have ended,
//     as the device requires;
//  3. the device closes the regions: nothing of the engine is mapped any more;
//  4. the leases end, so that their blocks can be evicted;
//  5. the look-up socket closes if no other engine names it;
//  6. the guests learn that nothing more comes from it, and tell it nothing more;
//  7. the seat becomes free for a successor.
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
	all.guests.Left(st.session.number)
	all.registry.vacate(st)
}

// unregisterLocked serves UNREGISTER. Its answer proves that the engine's memory is not touched any
// more.
func (s *session) unregisterLocked(m *ipc.Unregister) {
	answer := &ipc.Unregistered{Req: m.Req, Status: ipc.RegDone}
	if st := s.leaveLocked(); st != nil {
		s.log.Info("unregistered", zap.String("instance", st.engine.instance))
	} else {
		answer.Status, answer.Text = ipc.RegRefused, "the session has no registration"
	}
	s.answer(answer)
}
