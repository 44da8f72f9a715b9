package agent

import (
	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// declareStages serves STAGES, which a registered worker may send once.
func (s *session) declareStages(m *ipc.Stages) error {
	st := s.seat.Load()
	if st == nil || st.role != ipc.RoleWorker || st.stages != nil {
		return unexpected("STAGES", "stages", "no worker is registered, or its stages are declared already: "+
			"allowed once after its registration")
	}
	made, field, err := registration.MakeStages(m, st.layouts)
	if err != nil {
		return unexpected("STAGES", field, "%v", err)
	}
	st.stages = made
	return nil
}

// stagedLoad serves STAGED_LOAD: a LOAD that is copied by stages. Without STAGES it is invalid.
func (s *session) stagedLoad(m *ipc.StagedLoad) error {
	s.submitLease(m.Lease)
	status := s.loadStatus()
	job := transfer.Job{
		ID: m.Job, Kind: transfer.Load, Epoch: m.Epoch, Step: m.Step, Event: m.Event, Revoke: ipc.None,
	}
	if st := s.seat.Load(); st != nil {
		job.Staged = st.stages.Load(m.Word)
	}
	if job.Staged == nil && status == pool.OK {
		status = pool.Invalid
	}
	return s.submitLoad(job, m.Sections, m.Lease, status)
}
