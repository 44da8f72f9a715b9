package agent

import (
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
	seat     *seat
	job      transfer.Job
	sections []ipc.Section
	timer    *time.Timer
	forget   func() bool // withdraws the Settle call; under heldLoads.mu
}

// hold keeps a load back if its lease has open promises. It returns false if it has none, or, with
// full, if too many loads are held.
func (s *session) hold(job *transfer.Job, sections []ipc.Section, lease uint64) (held, full bool) {
	st := s.seat.Load()
	if s.owner.tiers == nil || st == nil || st.worker.Load() == nil {
		return false, false
	}
	h := &heldLoad{seat: st, job: *job, sections: sections}
	b := &st.held
	if !b.add(h, s.owner.cfg.Limits.Transfer.Queue) {
		return false, true
	}

	forget := s.owner.ledger.Settle(st.engine.acct, lease, h.resume)
	if forget == nil { // no promise is open: the caller continues with the load
		b.take(job.ID)
		return false, false
	}
	s.owner.metrics.LoadsHeld.Add(1)
	b.arm(h, forget, s.owner.cfg.Limits.Transfer.EventWait)
	return true, false
}

// add enters a load. It returns false if most loads are held already, or the registration ends.
func (b *heldLoads) add(h *heldLoad, most int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed || len(b.open) >= most {
		return false
	}
	if b.open == nil {
		b.open = make(map[uint64]*heldLoad)
	}
	b.open[h.job.ID] = h
	return true
}

// arm bounds how long a load is held, unless the load has ended already.
func (b *heldLoads) arm(h *heldLoad, forget func() bool, limit time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open[h.job.ID] == h {
		h.forget = forget
		h.timer = time.AfterFunc(limit, func() {
			if forget() {
				h.seat.session.owner.metrics.LoadsTimedOut.Add(1)
				h.resume()
			}
		})
	}
}

// take removes a load from the table and returns it, or nil if it is not held.
func (b *heldLoads) take(job uint64) *heldLoad {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.takeLocked(job)
}

func (b *heldLoads) takeLocked(job uint64) *heldLoad {
	h := b.open[job]
	if h == nil {
		return nil
	}
	delete(b.open, job)
	if h.timer != nil {
		h.timer.Stop()
	}
	return h
}

// handOver gives a load to the registration's worker, or ends it with the reason why the worker
// does not take it. It ignores a load that is no longer held.
func (b *heldLoads) handOver(h *heldLoad) {
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

// close ends all held loads and refuses further ones. When it returns, each has been reported or
// belongs to the worker.
func (b *heldLoads) close() {
	b.mu.Lock()
	b.closed = true
	var all []*heldLoad
	for job := range b.open {
		all = append(all, b.takeLocked(job))
	}
	b.mu.Unlock()
	for _, h := range all {
		h.cancel()
	}
}

// resume hands a load to the worker, if it is still held.
func (h *heldLoad) resume() {
	h.seat.held.handOver(h)
}

// cancel ends a load that was taken out of the table.
func (h *heldLoad) cancel() {
	if h.forget != nil {
		h.forget()
	}
	h.report(transfer.Cancelled)
}

// report reports a load that was not handed to the worker, with one status for all its blocks.
func (h *heldLoad) report(status pool.Status) {
	all := slices.Repeat([]pool.Status{status}, countBlocks(h.sections))
	h.seat.session.report(transfer.Completion{Job: h.job.ID, Kind: transfer.Load, Status: all})
}
