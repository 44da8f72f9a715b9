package agent

import (
	"sync"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// heldLoads are the LOADs of one session whose lease promises blocks that are still being brought up. Each is handed to the worker when the last of them has come or failed,
// or when it was held as long as a job waits for its event; what has not come by then is missing, block by block. A CANCEL, and the end of the registration, end them
// before. Whoever takes a load out of the book ends it: so it ends once.
type heldLoads struct {
	mu   sync.Mutex
	open map[uint64]*heldLoad
}

// heldLoad is one of them.
type heldLoad struct {
	session  *session
	job      transfer.Job
	sections []ipc.Section
	timer    *time.Timer
	forget   func() bool // takes the Settle back; under heldLoads.mu
}

// hold keeps a load back if its lease has promises that are open. False: it has none, or too many loads are held; full says the latter.
func (s *session) hold(job *transfer.Job, sections []ipc.Section, lease uint64) (held, full bool) {
	st := s.seat.Load()
	if s.agent.tiers == nil || st == nil || st.worker.Load() == nil || lease == 0 {
		return false, false
	}
	h := &heldLoad{session: s, job: *job, sections: sections}
	b := &s.held
	b.mu.Lock()
	if len(b.open) >= s.agent.cfg.Limits.Transfer.Queue {
		b.mu.Unlock()
		return false, true
	}
	if b.open == nil {
		b.open = make(map[uint64]*heldLoad)
	}
	b.open[job.ID] = h
	b.mu.Unlock()
	s.agent.inflight.add()

	at := &settling{}
	forget := s.agent.ledger.settle(st.engine.acct, lease, func() {
		if !at.landed() {
			h.goOn()
		}
	})
	if at.now() { // nothing was open: the caller goes on with it
		if b.take(job.ID) != nil {
			s.agent.inflight.done()
		}
		return false, false
	}
	s.agent.metrics.loadsHeld.Add(1)
	b.arm(h, forget, s.agent.cfg.Limits.Transfer.EventWait)
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

// arm bounds how long a load is held, unless it ended meanwhile.
func (b *heldLoads) arm(h *heldLoad, forget func() bool, limit time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open[h.job.ID] == h {
		h.forget = forget
		h.timer = time.AfterFunc(limit, func() {
			if forget() {
				h.session.agent.metrics.loadsUnsettled.Add(1)
				h.goOn()
			}
		})
	}
}

// take takes a load out of the book; nil: it is not held.
func (b *heldLoads) take(job uint64) *heldLoad {
	b.mu.Lock()
	defer b.mu.Unlock()
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

func (b *heldLoads) jobs() (ids []uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for id := range b.open {
		ids = append(ids, id)
	}
	return ids
}

// goOn hands a load to the worker, if it is still held.
func (h *heldLoad) goOn() {
	s := h.session
	if s.held.take(h.job.ID) != h {
		return
	}
	if status := s.start(&h.job, h.sections); status != pool.OK {
		h.end(status)
		return
	}
	s.agent.inflight.done() // start counts it anew
}

// end reports a load that was not handed to the worker, with one status for all its blocks.
func (h *heldLoad) end(status pool.Status) {
	all := make([]pool.Status, countBlocks(h.sections))
	for i := range all {
		all[i] = status
	}
	h.session.complete(transfer.Completion{Job: h.job.ID, Kind: transfer.Load, Status: all})
}

// cancelHeld ends a load that is held; false: it is not.
func (s *session) cancelHeld(job uint64) bool {
	h := s.held.take(job)
	if h == nil {
		return false
	}
	if h.forget != nil {
		h.forget()
	}
	h.end(transfer.Cancelled)
	return true
}

// cancelAllHeld ends the loads that a registration leaves behind.
func (s *session) cancelAllHeld() {
	for _, job := range s.held.jobs() {
		s.cancelHeld(job)
	}
}
