package transfer

import (
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// await waits until the engine's compute stream has got past the job's step: the step word says so and the event
// has fired. The event alone proves nothing, for it may fire because its process died; the word alone is written
// before the event, and only behind the event are the kernels' bytes there for others. OK: go on; anything else
// is the status of every block.
func (th *thread) await(t *task) pool.Status {
	th.enter(WaitingEvent)
	limits := &th.w.cfg.Limits
	pause := limits.PollFloor
	var timer *time.Timer
	for start := time.Now(); ; {
		s, status := th.look(t, t.job.Event)
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

// look asks whether the engine still wants the job; OK: it does.
func (th *thread) look(t *task, event uint32) (cudaipc.State, pool.Status) {
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

// poll asks the device for the job's words. Loads have no revocation word.
func (th *thread) poll(t *task, event uint32) (cudaipc.State, error) {
	wait := [1]cudaipc.Wait{{Peer: th.w.cfg.Peer, Event: event, Revoke: cudaipc.None, Step: t.job.Step}}
	if t.job.Kind == Save {
		wait[0].Revoke = t.job.Revoke
	}
	var state [1]cudaipc.State
	err := th.w.cfg.Device.Poll(wait[:], state[:])
	return state[0], err
}
