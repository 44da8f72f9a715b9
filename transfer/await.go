package transfer

import (
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// await waits until the engine's compute stream has passed the job's step: the step word has
// reached it and the event has fired. The event alone proves nothing, because it may fire when its
// process dies. The word is written before the event, and only after the event are the kernels'
// bytes visible to others. It returns OK, or the status of every block.
func (th *thread) await(t *task) pool.Status {
	th.enter(WaitingEvent)
	limits := &th.w.cfg.Limits
	pause := limits.PollFloor
	var timer *time.Timer
	start := time.Now()
	defer func() { t.clock.step = time.Since(start) }()
	for {
		s, status := th.pollWanted(t, t.job.Event)
		switch {
		case status != pool.OK:
			return status
		case s.Fired && s.Step >= t.job.Step:
			return pool.OK
		case time.Since(start) >= limits.EventWait:
			return TimedOut
		}
		if timer == nil {
			timer = time.NewTimer(pause)
			defer timer.Stop()
		} else {
			timer.Reset(pause)
		}
		if !th.wait(t, nil, timer.C) {
			return Cancelled
		}
		pause = min(2*pause, limits.PollCeiling)
	}
}

// pollWanted returns OK if the engine still wants the job, else the status of its blocks.
func (th *thread) pollWanted(t *task, event uint32) (cudaipc.State, pool.Status) {
	s, err := th.poll(t, event)
	switch {
	case err != nil:
		return s, Failed
	case s.Revoked:
		return s, Revoked
	case th.ended(t):
		return s, Cancelled
	}
	return s, pool.OK
}

// poll reads the job's words through the device. Loads have no revocation word.
func (th *thread) poll(t *task, event uint32) (cudaipc.State, error) {
	wait := cudaipc.Wait{Event: event, Revoke: cudaipc.None, Step: t.job.Step}
	if t.job.Kind == Save {
		wait.Revoke = t.job.Revoke
	}
	return th.w.cfg.Peer.Poll(wait)
}
