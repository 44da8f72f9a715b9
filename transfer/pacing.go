package transfer

import (
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer/pace"
)

// urgency returns whether a job's copies wait for the budget. A request waits for a load. A save
// that cannot be revoked keeps its blocks until it has ended, so it must end soon; and another
// awaited reports whether somebody waits for the worker's saves.
func (w *Worker) awaited() bool { return w.cfg.Awaited != nil && w.cfg.Awaited() }

// engine may wait for a save.
func (th *thread) urgency(t *task) pace.Urgency {
	if th.kind == Load || t.job.Revoke == cudaipc.None || th.w.awaited() {
		return pace.Urgent
	}
	return pace.Save
}

// awaitPace waits until the budget has room for the job's next batch. While batches are in flight
// it does not wait: nextLane begins no further one then. It returns OK, or the status of the blocks
// that are left: a save that was revoked or cancelled meanwhile takes nothing from the budget.
func (th *thread) awaitPace(t *task) pool.Status {
	if th.inFlight() > 0 || th.w.cfg.Pacer.May() || th.urgency(t) == pace.Urgent {
		return pool.OK
	}
	th.enter(WaitingPace)
	turn := th.w.cfg.Pacer.Enter(pace.Save)
	defer turn.Leave()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		if _, status := th.pollWanted(t, cudaipc.None); status != pool.OK {
			return status
		}
		wait := turn.Delay()
		if wait == 0 || th.urgency(t) == pace.Urgent {
			return pool.OK
		}
		timer.Reset(wait)
		if !th.wait(t, nil, timer.C) {
			return Cancelled
		}
	}
}
