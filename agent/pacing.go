package agent

import (
	"encoding/binary"
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
		engine.Steps(decodeSteps(m.List, time.Now()))
	}
}

// decodeSteps returns the steps of a message that was sent now.
func decodeSteps(list []byte, now time.Time) []pace.Step {
	out := make([]pace.Step, 0, len(list)/ipc.StepBytes)
	for ; len(list) > 0; list = list[ipc.StepBytes:] {
		end := now.Add(-micros(list))
		out = append(out, pace.Step{Begin: end.Add(-micros(list[4:])), End: end,
			Requests: binary.LittleEndian.Uint32(list[8:])})
	}
	return out
}

func micros(b []byte) time.Duration {
	return time.Duration(binary.LittleEndian.Uint32(b)) * time.Microsecond
}
