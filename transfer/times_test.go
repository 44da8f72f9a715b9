package transfer

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// latePeer is a peer whose copies end late, as do their sums after them.
type latePeer struct {
	cudaipc.Peer
	copy, sums time.Duration
}

func (p *latePeer) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	ticket, err := p.Peer.Copy(c)
	return func(timeout time.Duration) (cudaipc.Done, bool, error) { return p.endLate(ticket(timeout)) }, err
}

func (p *latePeer) endLate(done cudaipc.Done, ok bool, err error) (cudaipc.Done, bool, error) {
	if ok {
		time.Sleep(p.copy + p.sums)
		done.SumTime = p.sums
	}
	return done, ok, err
}

// latePool is a pool that commits and releases late.
type latePool struct {
	*dram.Pool
	late time.Duration
}

func (p *latePool) Commit(slots []pool.Slot, epoch uint32, status []pool.Status) {
	time.Sleep(p.late)
	p.Pool.Commit(slots, epoch, status)
}

func (p *latePool) Release(slots []pool.Slot, status []pool.Status) {
	time.Sleep(p.late)
	p.Pool.Release(slots, status)
}

// TestTimesOfStages delays each stage of a save, a load and a staged load by a time of its own, on
// a fake clock, and expects the stage to have it, and the stages to be all of the job's time.
func TestTimesOfStages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const step, lane, copied, sums, report = 20 * time.Millisecond, 70 * time.Millisecond, 200 * time.Millisecond,
			600 * time.Millisecond, 1500 * time.Millisecond
		n := newNode(t, 64)
		n.lanes = NewLanes(1, DefaultLimits.SaveAge, nil)
		s := n.join(t, func(c *Config) {
			c.Peer = &latePeer{Peer: c.Peer, copy: copied, sums: sums}
			c.Slots = &latePool{n.pool, report}
			c.Limits = DefaultLimits
			c.Limits.PollCeiling = c.Limits.PollFloor
		})
		for _, job := range []Job{save(1, section(0, 4, 0)), load(2, section(0, 4, 8)),
			s.staged(3, []uint16{0, 0, 0, 0}, section(0, 4, 16))} {
			letGo := s.hold(func() {})
			s.stream.Record(0)
			job.Event = 0
			taken := n.lanes.enter(Load)
			time.AfterFunc(step, letGo)
			time.AfterFunc(step+lane, func() { n.lanes.leave(taken) })
			start := time.Now()
			got := s.finish(job, pool.OK).Times
			all := time.Since(start)
			for name, stage := range map[string]struct{ got, want time.Duration }{
				"step": {got.Step, step}, "queue": {got.Queue, lane}, "copy": {got.Copy, copied},
				"sums": {got.Sums, sums}, "report": {got.Report, report},
				"all": {got.Step + got.Queue + got.Copy + got.Sums + got.Report, all},
			} {
				if off := stage.got - stage.want; off.Abs() > time.Millisecond || !got.Copied {
					t.Errorf("job %d: %s took %v, want %v: %+v", job.ID, name, stage.got, stage.want, got)
				}
			}
		}
		// One that waits for another's end, and of which nothing is copied.
		s.submit(load(4, section(0, 4, 8)))
		s.submit(load(5, section(30, 1, 8)))
		first := s.ends(4, pool.OK).Times
		got := s.ends(5, pool.Missing).Times
		if want := first.Copy + first.Sums + first.Report; got.Queue != want || got.Copied || got.Step != 0 {
			t.Errorf("queued for %+v, want %v", got, want)
		}
	})
}
