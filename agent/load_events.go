package agent

import (
	"errors"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/ipc"
)

var errNoLoadEvents = errors.New("load events are for workers that are registered, with regions on a GPU")

// loadEvents serves LOAD_EVENTS: the worker's device makes events that it records behind loads.
func (s *session) loadEvents(m *ipc.LoadEvents) *ipc.EventsMade {
	handles, err := s.makeLoadEvents(m)
	if err != nil {
		return &ipc.EventsMade{Req: m.Req, Status: ipc.RegRefused, Text: cutText(err.Error())}
	}
	return &ipc.EventsMade{Req: m.Req, Handles: handles}
}

func (s *session) makeLoadEvents(m *ipc.LoadEvents) ([]byte, error) {
	st := s.seat.Load()
	r, ok := s.agent.device.(cudaipc.Recorder)
	if st == nil || st.role != ipc.RoleWorker || !ok {
		return nil, errNoLoadEvents
	}
	return r.LoadEvents(st.peer, m.Off, m.Count)
}
