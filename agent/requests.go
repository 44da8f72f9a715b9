package agent

import (
	"fmt"

	"github.com/kvagent/kvagent/ipc"
)

// cancel serves CANCEL. A running job's DONE is sent when the worker has fenced it, and the answer
// right after it. An unknown job has ended already or never existed, and is answered at once.
func (s *session) cancel(m *ipc.Cancel) {
	if !s.jobs.Cancel(m.Job) {
		s.answer(&ipc.Cancelled{Job: m.Job})
		return
	}
	st := s.seat.Load()
	if st == nil {
		return // UNREGISTER ended it, and its DONE will be sent
	}
	if h := st.held.take(m.Job); h != nil {
		h.cancel()
	} else if w := st.worker.Load(); w != nil {
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
	epoch, err := s.owner.epochs.reset(st.space, s, fmt.Sprintf("instance %q", st.engine.instance))
	if err != nil {
		s.answer(&ipc.ResetDone{Req: m.Req, Status: ipc.RegRefused, Text: cutText(err.Error())})
		return
	}
	s.answer(&ipc.ResetDone{Req: m.Req, Status: ipc.RegDone, Epoch: epoch})
}
