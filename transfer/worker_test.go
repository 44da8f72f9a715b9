package transfer

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/pool"
)

// TestTwoEnginesStoreOnce expects an engine to be told at once that another one copies the same
// blocks, and to hold nothing.
func TestTwoEnginesStoreOnce(t *testing.T) {
	n := newNode(t, 64)
	g := newGate()
	first, second := n.join(t, g.before), n.join(t, nil)
	first.write(3, 1)
	first.submit(save(1, section(0, 1, 3)))
	g.during(first, "the first save", func() {
		used := n.pool.Stats().Used
		second.finish(save(1, section(0, 1, 5)), pool.InProgress)
		if now := n.pool.Stats().Used; now != used {
			t.Errorf("the second save holds %d bytes", now-used)
		}
	})
	g.open()
	first.ends(1, pool.OK)
	second.finish(load(2, section(0, 1, 8)), pool.OK)
	second.expect(8, 1, "the block of the first engine")
	second.finish(save(3, section(0, 1, 5)), pool.Exists)
}

func TestFullQueueIsBusy(t *testing.T) {
	s := newNode(t, 64).join(t, func(c *Config) { c.Limits = DefaultLimits; c.Limits.Queue = 3 })
	letGo := s.hold(func() {})
	s.stream.Record(0)
	job := func(id uint64) Job {
		j := save(id, section(int(id), 1, 0))
		j.Event = 0
		return j
	}
	s.submit(job(1))
	s.reaches(Save, WaitingEvent, "the save did not wait")
	for id := uint64(2); id <= 4; id++ {
		s.submit(job(id))
	}
	if err := s.worker.Submit(job(5)); !errors.Is(err, ErrBusy) {
		t.Fatalf("a job more than the queue holds: %v, want ErrBusy", err)
	}
	if state := s.worker.State().Save; state.Queue != 3 || state.Job != 1 {
		t.Errorf("state %+v", state)
	}
	s.submit(load(9, section(0, 1, 0))) // the other direction has a queue of its own
	s.ends(9, pool.Missing)
	letGo()
	for id := uint64(1); id <= 4; id++ {
		s.ends(id, pool.OK)
	}
}

// TestQueueOfLargeJobsIsBusy expects jobs to be counted by their blocks too, because those take
// memory, and one job to have a place always.
func TestQueueOfLargeJobsIsBusy(t *testing.T) {
	s := newNode(t, 64).join(t, func(c *Config) { c.Limits = DefaultLimits; c.Limits.QueueBlocks = 5 })
	letGo := s.hold(func() {})
	s.stream.Record(0)
	job := func(id uint64, blocks int) Job {
		j := save(id, section(10*int(id), blocks, 0))
		j.Event = 0
		return j
	}
	s.submit(job(1, 1))
	s.reaches(Save, WaitingEvent, "the save did not wait")
	s.submit(job(2, 6)) // more than the limit, but no job waits
	if err := s.worker.Submit(job(3, 1)); !errors.Is(err, ErrBusy) {
		t.Errorf("a block more than the queue holds: %v, want ErrBusy", err)
	}
	s.worker.Cancel(2)
	s.ends(2, Cancelled)
	s.submit(job(4, 3))
	s.submit(job(5, 2))
	if err := s.worker.Submit(job(6, 1)); !errors.Is(err, ErrBusy) {
		t.Errorf("a block more than the queue holds: %v, want ErrBusy", err)
	}
	letGo()
	for _, id := range []uint64{1, 4, 5} {
		s.ends(id, pool.OK)
	}
	s.finish(save(7, section(70, 5, 0)), pool.OK) // the count went down again
}

// TestCancelInTheQueue expects a job that has not begun to be cancelled though the one before it
// waits.
func TestCancelInTheQueue(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	letGo := s.hold(func() {})
	s.stream.Record(0)
	first, second := load(1, section(0, 1, 0)), load(2, section(0, 2, 0))
	first.Event = 0
	s.submit(first)
	s.reaches(Load, WaitingEvent, "the load did not wait")
	s.submit(second)
	if !s.worker.Cancel(2) {
		t.Fatal("a job in the queue is not known")
	}
	s.ends(2, Cancelled)
	if !s.worker.Cancel(1) {
		t.Fatal("the job at hand is not known")
	}
	s.ends(1, Cancelled)
	if s.worker.Cancel(3) {
		t.Error("a job that never was is known")
	}
	letGo()
}

// TestCancelWhileWaitingForALane expects the same of a job that waits for other workers' copies.
func TestCancelWhileWaitingForALane(t *testing.T) {
	n := newNode(t, 64)
	n.lanes = NewLanes(1, time.Second, nil)
	s := n.join(t, nil)
	other := n.lanes.enter(Load)
	s.submit(save(1, section(0, 4, 0)))
	s.reaches(Save, WaitingLane, "the save did not wait for a lane")
	if used := n.pool.Stats().Used; used != 0 {
		t.Errorf("%d bytes of the pool are held while the save waits", used)
	}
	s.worker.Cancel(1)
	s.ends(1, Cancelled)
	n.lanes.leave(other)
	s.finish(save(2, section(0, 4, 0)), pool.OK)
}

func TestRevokedWhileWaiting(t *testing.T) {
	s := newNode(t, 64).join(t, nil)
	s.hold(func() {})
	s.stream.Record(0)
	job := save(1, section(0, 1, 0))
	job.Event, job.Revoke = 0, 3
	s.submit(job)
	s.reaches(Save, WaitingEvent, "the save did not wait")
	s.engine.Revoke(3)
	s.ends(1, Revoked)
	s.engine.ClearRevoke(3)
}

// TestEventThatNeverComes is bounded by EventWait, in the clock of a bubble.
func TestEventThatNeverComes(t *testing.T) {
	for _, kind := range []Kind{Save, Load} {
		synctest.Test(t, func(t *testing.T) {
			s := newNode(t, 64).join(t, nil)
			s.write(1, 1)
			s.hold(func() {})
			s.stream.Record(0)
			job := save(1, section(0, 1, 1))
			job.Kind, job.Event = kind, 0
			start := time.Now()
			s.submit(job)
			c := <-s.done
			if c.Status[0] != TimedOut {
				t.Errorf("kind %d: status %d, want timed out", kind, c.Status[0])
			}
			if took := time.Since(start); took < DefaultLimits.EventWait || took > DefaultLimits.EventWait+time.Second {
				t.Errorf("kind %d: gave up after %v, want %v", kind, took, DefaultLimits.EventWait)
			}
			s.expect(1, 1, "a load that timed out")
		})
	}
}

// TestCloseCompletesEveryJob expects Close to complete the jobs in the queues, the one that waits,
// and the one whose copy is in flight.
func TestCloseCompletesEveryJob(t *testing.T) {
	n := newNode(t, 64)
	g := newGate()
	s := n.join(t, g.before)
	for id := uint64(1); id <= 10; id++ {
		s.submit(save(id, section(int(id), 1, 0)))
		job := load(100+id, section(int(id), 1, 0))
		job.Step = 1 << 60
		s.submit(job)
	}
	closed := make(chan struct{})
	g.during(s, "close before the copy has ended", func() {
		go func() {
			s.worker.Close()
			close(closed)
		}()
		s.waitClosed()
		// All but the job whose copy is under way end at once.
		for range 19 {
			if c := s.completion(); c.Status[0] != Cancelled || c.Job == 1 {
				t.Errorf("job %d: status %d, want cancelled", c.Job, c.Status[0])
			}
		}
	})
	select {
	case <-closed:
		t.Error("Close returned while a copy was under way")
	default:
	}
	g.open()
	s.ends(1, Cancelled)
	<-closed
	s.worker.Close() // once more is nothing
	if s.stored(1, 1) != 0 {
		t.Error("a save that Close cancelled was stored")
	}
}

// waitClosed submits what is refused in any case, until it is refused because of Close.
func (s *station) waitClosed() {
	s.t.Helper()
	devicetest.Until(s.t, "Submit after Close is ErrClosed", func() bool {
		return errors.Is(s.worker.Submit(Job{Sections: []Section{{Group: 9}}}), ErrClosed)
	})
}
