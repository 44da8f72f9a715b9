package transfer

import (
	"fmt"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

func (l *Limits) check() error {
	for _, limit := range []struct {
		name  string
		value int64
	}{
		{"queue", int64(l.Queue)}, {"queue_blocks", int64(l.QueueBlocks)}, {"batch_bytes", l.BatchBytes},
		{"batches", int64(l.Batches)}, {"event_wait", int64(l.EventWait)},
		{"save_age", int64(l.SaveAge)}, {"sample_wait", int64(l.SampleWait)}, {"poll_floor", int64(l.PollFloor)},
		{"poll_ceiling", int64(l.PollCeiling - l.PollFloor + 1)},
	} {
		if limit.value < 1 {
			return fmt.Errorf("limits.%s: %d is below 1 (poll_ceiling: below poll_floor): %w", limit.name, limit.value,
				ErrInvalid)
		}
	}
	if l.Batches > maxBatches {
		return fmt.Errorf("limits.batches: %d, at most %d: %w", l.Batches, maxBatches, ErrInvalid)
	}
	if l.SampleWait > cudaipc.MaxSampleWait {
		return fmt.Errorf("limits.sample_wait: %v, at most %v: %w", l.SampleWait, cudaipc.MaxSampleWait, ErrInvalid)
	}
	return nil
}

// Submit hands a job to its thread. It returns ErrBusy if the queue is full, ErrInvalid, with the
// place, if the job names what the worker does not have, or ErrClosed. Without an error, a
// Completion follows.
func (w *Worker) Submit(job Job) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mu.closed {
		return ErrClosed
	}
	blocks, err := w.checkJobLocked(&job)
	if err != nil {
		return fmt.Errorf("job %d: %w", job.ID, err)
	}
	th := w.mu.threads[job.Kind]
	if n := len(th.queue); n >= w.cfg.Limits.Queue || (n > 0 && th.blocks+blocks > w.cfg.Limits.QueueBlocks) {
		th.counts.Refused++
		return ErrBusy
	}
	status := make([]pool.Status, blocks)
	t := &task{job: job, status: status, shards: status, cancel: make(chan struct{}),
		clock: clock{submitted: time.Now()}}
	w.mu.jobs[job.ID] = t
	th.queue = append(th.queue, t)
	th.blocks += blocks
	th.signal()
	return nil
}

// Cancel asks for a job to end early. The job's Completion is the acknowledgement: it comes when no
// byte of the job's blocks is touched any more. Cancel returns false if there is no such job, or
// its Completion is being or has been reported.
func (w *Worker) Cancel(id uint64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.mu.jobs[id]
	if t == nil {
		return false
	}
	if !t.cancelled {
		t.cancelled = true
		close(t.cancel)
		w.mu.threads[t.job.Kind].signal()
	}
	return true
}
