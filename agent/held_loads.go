package agent

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// heldLoads are the LOADs of one registration whose lease promises blocks that are still being
// fetched. Each is handed to that registration's worker when its last block has arrived or failed,
// or after the time a job waits for its event; blocks absent by then are missing. A CANCEL or the
// end of the registration ends them earlier. The caller that takes a load out of the table ends it,
// so it ends once. Loads are handed over under the mutex, so close leaves none half-way.
type heldLoads struct {
	start func(*transfer.Job, []ipc.Section) pool.Status // hands a job to the registration's worker

	mu     sync.Mutex
	open   map[uint64]*heldLoad
	closed bool // the registration ends
}

// heldLoad is one held LOAD.
type heldLoad struct {
	session  *session
	job      transfer.Job
	sections []ipc.Section
	timer    *time.Timer
	forget   func() bool // withdraws the Settle call
}

// hold keeps a load back if its lease has open promises. It returns false if it has none, or, with
// full, if too many loads are held, or the registration ends.
func (s *session) hold(job *transfer.Job, sections []ipc.Section, lease uint64) (held, full bool) {
	st := s.seat.Load()
	if s.owner.tiers == nil || st == nil || st.worker.Load() == nil {
		return false, false
	}
	b, limits := &st.held, &s.owner.cfg.Limits.Transfer
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || len(b.open) >= limits.Queue {
		return false, true
	}
	h := &heldLoad{session: s, job: *job, sections: sections}
	if h.forget = s.owner.ledger.Settle(st.engine.acct, lease, func() { b.resume(h) }); h.forget == nil {
		return false, false // no promise is open: the caller continues with the load
	}
	h.timer = time.AfterFunc(limits.EventWait, func() {
		if h.forget() {
			s.owner.metrics.LoadsTimedOut.Add(1)
			b.resume(h)
		}
	})
	if b.open == nil {
		b.open = make(map[uint64]*heldLoad)
	}
	b.open[job.ID] = h
	s.owner.metrics.LoadsHeld.Add(1)
	return true, false
}

// takeLocked removes a load from the table and returns it, or nil if it is not held.
func (b *heldLoads) takeLocked(job uint64) *heldLoad {
	h := b.open[job]
	if h != nil {
		delete(b.open, job)
		h.timer.Stop()
	}
	return h
}

// resume gives a load to the registration's worker, or ends it with the reason why the worker does
// not take it. It ignores a load that is no longer held.
func (b *heldLoads) resume(h *heldLoad) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open[h.job.ID] != h {
		return
	}
	b.takeLocked(h.job.ID)
	if status := b.start(&h.job, h.sections); status != pool.OK {
		h.report(status)
	}
}

// cancel ends a load. It returns false if it is not held.
func (b *heldLoads) cancel(job uint64) bool {
	b.mu.Lock()
	h := b.takeLocked(job)
	b.mu.Unlock()
	if h == nil {
		return false
	}
	h.forget()
	h.report(transfer.Cancelled)
	return true
}

// close ends all held loads and refuses further ones. When it returns, each has been reported or
// belongs to the worker.
func (b *heldLoads) close() {
	b.mu.Lock()
	b.closed = true
	all := slices.Collect(maps.Keys(b.open))
	b.mu.Unlock()
	for _, job := range all {
		b.cancel(job)
	}
}

// report reports a load that was not handed to the worker, with one status for all its blocks.
func (h *heldLoad) report(status pool.Status) {
	all := slices.Repeat([]pool.Status{status}, countBlocks(h.sections))
	h.session.report(transfer.Completion{Job: h.job.ID, Kind: transfer.Load, Status: all})
}
