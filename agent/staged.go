package agent

import (
	"encoding/binary"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// stages are what a worker declared for its staged loads.
type stages struct {
	*transfer.Stages
	off   uint64 // of the words, in the sync region
	count uint32
}

// declareStages serves STAGES, which a registered worker may send once.
func (s *session) declareStages(m *ipc.Stages) error {
	st := s.seat.Load()
	switch {
	case st == nil || st.role != ipc.RoleWorker:
		return unexpected("STAGES", "stages", "there is no registration, allowed after that of a worker")
	case st.stages != nil:
		return unexpected("STAGES", "stages", "they are declared already, allowed once in a registration")
	case m.Off%wordBytes != 0:
		return unexpected("STAGES", "off", "%d, allowed is a multiple of %d", m.Off, wordBytes)
	}
	list := make([]uint16, len(m.List)/2)
	for i := range list {
		list[i] = binary.LittleEndian.Uint16(m.List[2*i:])
	}
	made, err := transfer.MakeStages(st.layouts, list)
	if err != nil {
		return unexpected("STAGES", "stages", "%v", err)
	}
	st.stages = &stages{made, m.Off, m.Count}
	return nil
}

// wordBytes is the size of the word that counts the stages of a load.
const wordBytes = 8

// stagedLoad serves STAGED_LOAD: a LOAD that is copied by stages. Without STAGES it is invalid.
func (s *session) stagedLoad(m *ipc.StagedLoad) error {
	s.submitLease(m.Lease)
	status := s.loadStatus()
	job := transfer.Job{
		ID: m.Job, Kind: transfer.Load, Epoch: m.Epoch, Step: m.Step, Event: m.Event, Revoke: ipc.None,
	}
	if st := s.seat.Load(); st != nil && st.stages != nil && m.Word < st.stages.count {
		job.Staged = &transfer.Staged{Stages: st.stages.Stages, Word: st.stages.off + wordBytes*uint64(m.Word)}
	} else if status == pool.OK {
		status = pool.Invalid
	}
	return s.submitLoad(job, m.Sections, m.Lease, status)
}
