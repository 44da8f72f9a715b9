package transfer

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// doneWait is how long one call waits for a copy; then the thread waits again. Any value does.
const doneWait = time.Minute

// task is a submitted job. Its thread owns it once it has left the queue.
type task struct {
	job    Job
	status []pool.Status // of each block of all sections
	// of each shard held of each block: the first shard's of all blocks, then the second's; status
	// itself if there is one shard, or the job has not begun
	shards []pool.Status
	bytes  int64 // moved
	sample SampleCounts
	clock  clock
	cancel chan struct{} // closed by Cancel, once
	once   sync.Once
}

// thread does the jobs of one kind, one after the other.
type thread struct {
	w    *Worker
	kind Kind
	more *sync.Cond // a job was queued, or the worker is being closed

	// Under Worker.mu.
	queue  []*task
	blocks int   // of the queue
	job    *task // nil: idle
	phase  Phase
	since  time.Time // of the phase

	// The thread's own: reused from batch to batch.
	spans  []span
	slots  []pool.Slot
	begun  []*flight // batches in flight, oldest first
	spares []*flight // for reuse
	picker *picker
}

func (th *thread) run() {
	for t := th.next(); t != nil; t = th.next() {
		if th.kind == Save {
			th.save(t)
		} else {
			th.load(t)
		}
		th.complete(t)
	}
}

// next waits for a job and takes the oldest; nil: the worker is being closed.
func (th *thread) next() *task {
	w := th.w
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(th.queue) == 0 {
		if w.mu.closed {
			return nil
		}
		th.more.Wait()
	}
	t := th.queue[0]
	th.dropLocked(t)
	th.job = t
	if n := len(w.held); n > 1 {
		t.shards = make([]pool.Status, n*len(t.status))
	}
	th.enterLocked(Checking)
	return t
}

// dropLocked takes a job from the queue, and reports whether it was there.
func (th *thread) dropLocked(t *task) bool {
	i := slices.Index(th.queue, t)
	if i < 0 {
		return false
	}
	th.queue = slices.Delete(th.queue, i, i+1)
	th.blocks -= len(t.status)
	return true
}

// report reports a job that is not among the worker's any more, so its ID may be reused.
func (w *Worker) report(t *task) {
	w.cfg.Complete(Completion{Job: t.job.ID, Kind: t.job.Kind, Sections: t.job.Sections, Status: t.status,
		Bytes: t.bytes, Sample: t.sample, Times: t.clock.times()})
}

// complete reports the thread's job.
func (th *thread) complete(t *task) {
	w := th.w
	t.join()
	w.mu.Lock()
	delete(w.mu.jobs, t.job.ID)
	th.enterLocked(Completing)
	w.mu.Unlock()
	w.report(t)
	w.mu.Lock()
	th.job = nil
	th.enterLocked(Idle)
	w.mu.Unlock()
}

func (t *task) index(held, number int) int { return held*len(t.status) + number }

// setFrom sets the status of all shards of the blocks from number i on.
func (t *task) setFrom(i int, s pool.Status) {
	for from := 0; from < len(t.shards); from += len(t.status) {
		t.set(from+i, len(t.status)-i, s)
	}
}

// set sets the status of n elements of shards from index i on.
func (t *task) set(i, n int, s pool.Status) {
	for ; n > 0; i, n = i+1, n-1 {
		t.shards[i] = s
	}
}

// join sets the status of each block to the worst of its shards.
func (t *task) join() {
	if len(t.shards) == len(t.status) {
		return
	}
	copy(t.status, t.shards)
	for i := len(t.status); i < len(t.shards); i++ {
		if at := &t.status[i%len(t.status)]; badness(t.shards[i]) > badness(*at) {
			*at = t.shards[i]
		}
	}
}

// badness orders the statuses of shards: a block of which some were stored was stored.
func badness(s pool.Status) int {
	if s == pool.Exists {
		return -1
	}
	return int(s)
}

// ended reports whether the job is cancelled or the worker is being closed.
func (th *thread) ended(t *task) bool {
	select {
	case <-t.cancel:
		return true
	case <-th.w.stop:
		return true
	default:
		return false
	}
}

// wait returns true when ready or timer fires, and false at the job's cancel or the worker's end.
func (th *thread) wait(t *task, ready <-chan struct{}, timer <-chan time.Time) bool {
	select {
	case <-ready:
		return true
	case <-timer:
		return true
	case <-t.cancel:
		return false
	case <-th.w.stop:
		return false
	}
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
		return ErrBusy
	}
	status := make([]pool.Status, blocks)
	t := &task{job: job, status: status, shards: status, cancel: make(chan struct{}),
		clock: clock{submitted: time.Now()}}
	w.mu.jobs[job.ID] = t
	th.queue = append(th.queue, t)
	th.blocks += blocks
	th.more.Signal()
	return nil
}

// Cancel asks for a job to end early. The job's Completion is the acknowledgement: it comes when no
// byte of the job's blocks is touched any more; that of a job that waits, within the call. Cancel
// returns false if there is no such job, or its Completion is being or has been reported.
func (w *Worker) Cancel(id uint64) bool {
	w.mu.Lock()
	t := w.mu.jobs[id]
	queued := t != nil && w.mu.threads[t.job.Kind].dropLocked(t)
	if queued {
		delete(w.mu.jobs, id)
	} else if t != nil {
		t.once.Do(func() { close(t.cancel) })
	}
	w.mu.Unlock()
	if queued {
		t.setFrom(0, Cancelled)
		w.report(t)
	}
	return t != nil
}
