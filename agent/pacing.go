package agent

import (
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/transfer/pace"
)

// steps serves STEPS. The pacer of the worker's device compares the steps with the copies of the
// same time; a session that has no worker has none to compare.
func (s *session) steps(m *ipc.Steps) {
	st := s.seat.Load()
	if st == nil {
		return
	}
	if engine := st.steps.Load(); engine != nil {
		engine.Steps(pace.ParseSteps(m.List, time.Now()))
	}
}
