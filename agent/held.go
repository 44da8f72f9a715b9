package agent

import (
	"sync"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// heldLoads are the LOADs of one registration whose lease promises blocks that are still being
// brought up. Each is handed to that registration's worker, and to no other, when the last of them
// has come or failed, or when it was held as long as a job waits for its event; what has not come
// by then is missing, block by block. A CANCEL, and the end of the registration, end them before.
// Whoever takes a load out of the book ends it: so it ends once. The hand-over is made under the
// mutex, so that close returns when none is left half-way.
type heldLoads struct {
	start func(*transfer.Job, []ipc.Section) pool.Status // hands a job to the registration's worker

	mu     sync.Mutex
	open   map[uint64]*heldLoad
	closed bool // the registration ends
}

// heldLoad is one of them.
type heldLoad struct {
	seat     *seat
	job      transfer.Job
	sections []ipc.Section
	timer    *time.Timer
	forget   func() bool // takes the Settle back; under heldLoads.mu
}

// hold keeps a load back if its lease has promises that are open. False: it has none, or too many loads are held; full says the latter.
func (s *session) hold(job *transfer.Job, sections []ipc.Section, lease uint64) (held, full bool) {
	st := s.seat.Load()
	if s.owner.tiers == nil || st == nil || st.worker.Load() == nil || lease == 0 {
		return false, false
	}
	h := &heldLoad{seat: st, job: *job, sections: sections}
	b := &st.held
	if !b.add(h, s.owner.limits.Transfer.Queue) {
		return false, true
	}
	s.owner.inflight.add()

	at := &settling{}
	forget := s.owner.ledger.Settle(st.engine.acct, lease, func() {
		if !at.landed() {
			h.goOn()
		}
	})
	if at.now() { // nothing was open: the caller goes on with it
		if b.take(job.ID) != nil {
			s.owner.inflight.done()
		}
		return false, false
	}
	s.owner.metrics.LoadsHeld.Add(1)
	b.arm(h, forget, s.owner.limits.Transfer.EventWait)
	return true, false
}

// settling tells a Settle that ended before it returned from one that ends later.
type settling struct {
	mu       sync.Mutex
	returned bool // Settle returned
	over     bool // then was called before
}

// landed is called by then; true: before Settle had returned, so that who called that goes on.
func (s *settling) landed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.over = !s.returned
	return s.over
}

// now is called behind Settle; true: then was called already.
func (s *settling) now() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.returned = true
	return s.over
}

// add enters a load; false: most are held already, or the registration ends.
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

// arm bounds how long a load is held, unless it ended meanwhile.
func (b *heldLoads) arm(h *heldLoad, forget func() bool, limit time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open[h.job.ID] == h {
		h.forget = forget
		h.timer = time.AfterFunc(limit, func() {
			if forget() {
				h.seat.session.owner.metrics.LoadsUnsettled.Add(1)
				h.goOn()
			}
		})
	}
}

// take takes a load out of the book; nil: it is not held.
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

// handOver gives a load to the registration's worker, or ends it with the reason why that does not
// take it. A load that is not held any more is somebody else's.
func (b *heldLoads) handOver(h *heldLoad) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open[h.job.ID] != h {
		return
	}
	b.takeLocked(h.job.ID)
	defer h.seat.session.owner.inflight.done() // start counts it anew
	if status := b.start(&h.job, h.sections); status != pool.OK {
		h.report(status)
	}
}

// close ends all loads that are held, and sees to it that no more are. When it returns, each has
// been reported or is the worker's.
func (b *heldLoads) close() {
	for _, h := range b.takeAll() {
		h.cancel()
	}
}

func (b *heldLoads) takeAll() (all []*heldLoad) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	for job := range b.open {
		all = append(all, b.takeLocked(job))
	}
	return all
}

// goOn hands a load to the worker, if it is still held.
func (h *heldLoad) goOn() {
	h.seat.session.protect(panicHeld, func() { h.seat.held.handOver(h) })
}

// cancel ends a load that was taken out of the book.
func (h *heldLoad) cancel() {
	defer h.seat.session.owner.inflight.done()
	if h.forget != nil {
		h.forget()
	}
	h.report(transfer.Cancelled)
}

// report reports a load that was not handed to the worker, with one status for all its blocks.
func (h *heldLoad) report(status pool.Status) {
	all := make([]pool.Status, countBlocks(h.sections))
	for i := range all {
		all[i] = status
	}
	h.seat.session.report(transfer.Completion{Job: h.job.ID, Kind: transfer.Load, Status: all})
}
