package agent

import (
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/registration"
	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
	"github.com/kvagent/kvagent/transfer/pace"
)

// save serves SAVE.
func (s *session) save(m *ipc.Save) error {
	return s.submit(transfer.Job{
		ID: m.Job, Kind: transfer.Save, Epoch: m.Epoch, Step: m.Step, Event: m.Event, Revoke: m.Revoke,
	}, m.Sections, 0, s.owner.switches.admits(&s.owner.switches.saves))
}

// load serves LOAD. If the lease that it names was revoked before or has ended, the job still runs,
// but its blocks may be missing.
func (s *session) load(m *ipc.Load) error {
	return s.submit(transfer.Job{
		ID: m.Job, Kind: transfer.Load, Epoch: m.Epoch, Step: m.Step, Event: m.Event, Revoke: ipc.None,
	}, m.Sections, m.Lease, s.owner.switches.admits(&s.owner.switches.loads))
}

// admits returns OK, or the status of all blocks of a job that is not accepted now.
func (s *switches) admits(kind *atomic.Bool) pool.Status {
	switch {
	case s.draining():
		return pool.Busy
	case !kind.Load():
		return transfer.Off
	}
	return pool.OK
}

// submit hands a job to the session's worker. A load's lease is not revoked from now on, and the
// load is held while blocks that the lease promises are being fetched. If status is not OK, or the
// worker does not take the job, submit reports the job with that status for all its blocks.
func (s *session) submit(job transfer.Job, sections []ipc.Section, lease uint64, status pool.Status) error {
	st := s.seat.Load()
	if st != nil && lease != 0 && !s.owner.ledger.Submit(st.engine.acct, lease) {
		s.owner.metrics.LeasesUnknown.Add(1)
	}
	if !s.jobs.add(job.ID) {
		return unexpected("job", "job", "%d runs already, allowed is a number that is unique in the session", job.ID)
	}
	if status == pool.OK && lease != 0 {
		held, full := s.hold(&job, sections, lease)
		if held {
			return nil
		}
		if full {
			status = pool.Busy
		}
	}
	if status == pool.OK {
		if status = st.start(&job, sections); status == pool.OK {
			return nil
		}
	}
	s.jobs.drop(job.ID)
	statuses := slices.Repeat([]pool.Status{status}, countBlocks(sections))
	s.owner.metrics.CountBlocks(job.Kind, statuses, 0)
	if job.Kind == transfer.Save {
		s.saved(convertSections(sections), statuses)
	}
	s.answer(done(job.ID, statuses))
	return nil
}

// start tries to start a job of this registration, which may have ended; nil: there is none. It
// returns OK if the job was accepted, else the status of its blocks.
func (st *seat) start(job *transfer.Job, sections []ipc.Section) pool.Status {
	if st == nil || st.role != ipc.RoleWorker {
		return pool.Invalid
	}
	w := st.worker.Load()
	if w == nil { // the sizes of some shards are not known yet, so nothing can be stored
		if job.Kind == transfer.Save {
			return pool.Busy
		}
		return pool.Missing
	}
	job.Sections = convertSections(sections)
	switch err := w.Submit(*job); {
	case err == nil:
		return pool.OK
	case errors.Is(err, transfer.ErrBusy):
		return pool.Busy
	case errors.Is(err, transfer.ErrInvalid):
		return pool.Invalid
	default:
		return transfer.Cancelled // the worker is being closed
	}
}

// report counts a finished job and notifies the peer. The worker's threads call it; it does not
// block.
func (s *session) report(c transfer.Completion) {
	s.owner.metrics.CountBlocks(c.Kind, c.Status, c.Bytes)
	s.owner.metrics.Samples[c.Kind].Add(&c.Sample)
	s.owner.metrics.Stages.Observe(c.Kind, &c.Times)
	s.logTimes(&c)
	if c.Kind == transfer.Save {
		s.saved(c.Sections, c.Status)
	}
	s.jobs.finish(done(c.Job, c.Status), s.notify)
}

// logTimes logs where a job's time went.
func (s *session) logTimes(c *transfer.Completion) {
	if line := s.log.Check(zap.DebugLevel, report.DirectionNames[c.Kind]); line != nil {
		t := &c.Times
		line.Write(zap.Uint64("job", c.Job), zap.Int("blocks", len(c.Status)), zap.Int64("bytes", c.Bytes),
			zap.Bool("copied", t.Copied), zap.Duration("step", t.Step), zap.Duration("queue", t.Queue),
			zap.Duration("copy", t.Copy), zap.Duration("sums", t.Sums), zap.Duration("report", t.Report))
	}
}

func done(job uint64, status []pool.Status) *ipc.Done {
	m := &ipc.Done{Job: job, Status: make([]byte, len(status))}
	for i, v := range status {
		m.Status[i] = byte(v)
	}
	return m
}

// blockBytes is the size of one block ID in a section.
const blockBytes = 4

func countBlocks(sections []ipc.Section) int {
	n := 0
	for i := range sections {
		n += sections[i].Len()
	}
	return n
}

// convertSections converts sections to a worker's form; the hashes stay in the message's memory.
// Package ipc has checked that the lengths agree, and Submit checks each section against the
// worker's layout.
func convertSections(in []ipc.Section) []transfer.Section {
	out := make([]transfer.Section, len(in))
	for i := range in {
		s := &in[i]
		blocks := make([]uint32, s.Len())
		for b := range blocks {
			blocks[b] = binary.LittleEndian.Uint32(s.Blocks[b*blockBytes:])
		}
		out[i] = transfer.Section{Group: s.Group, Parent: s.Parent, Hashes: pool.Chain(s.Hashes, int(s.HashLen)),
			Blocks: blocks}
	}
	return out
}

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
	status := s.owner.switches.admits(&s.owner.switches.loads)
	job := transfer.Job{
		ID: m.Job, Kind: transfer.Load, Epoch: m.Epoch, Step: m.Step, Event: m.Event, Revoke: ipc.None,
	}
	if st := s.seat.Load(); st != nil {
		job.Staged = st.stages.Load(m.Word)
	}
	if job.Staged == nil && status == pool.OK {
		status = pool.Invalid
	}
	return s.submit(job, m.Sections, m.Lease, status)
}

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

// jobTable holds the running jobs of one session, so that no number is used twice at once, and how
// many CANCELs wait for each: they are answered after the job's DONE.
type jobTable struct {
	mu   sync.Mutex
	open map[uint64]int // by job: CANCELs to answer
}

// add enters a job. It returns false if its number is taken.
func (t *jobTable) add(job uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, twice := t.open[job]; twice {
		return false
	}
	if t.open == nil {
		t.open = make(map[uint64]int)
	}
	t.open[job] = 0
	return true
}

// cancel notes that a CANCEL waits for the job. It returns false if the job does not run.
func (t *jobTable) cancel(job uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, runs := t.open[job]; !runs {
		return false
	}
	t.open[job]++
	return true
}

// finish ends a job: send is called with its DONE and then the answers to its CANCELs, in one step,
// so that a concurrent CANCEL finds the job either running or reported.
func (t *jobTable) finish(done *ipc.Done, send func(any)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	cancels := t.open[done.Job]
	delete(t.open, done.Job)
	send(done)
	for range cancels {
		send(&ipc.Cancelled{Job: done.Job})
	}
}

// drop removes a job that was not accepted.
func (t *jobTable) drop(job uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.open, job)
}

// count returns the number of jobs.
func (t *jobTable) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.open)
}
