package agent

import (
	"context"
	"sync"

	"github.com/kvagent/kvagent/ipc"
)

// jobTable holds the running jobs of one session, so that no number is used twice at once, and how
// many CANCELs wait for each: they are answered after the job's DONE.
type jobTable struct {
	mu   sync.Mutex
	open map[uint64]int // by job: CANCELs to answer
}

func (t *jobTable) add(job uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, twice := t.open[job]; twice {
		return false
	}
	if t.open == nil {
		t.open = make(map[uint64]int)
	}
	t.open[job] = 0
	return true
}

// cancel notes that a CANCEL waits for the job. It returns false if the job does not run.
func (t *jobTable) cancel(job uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, runs := t.open[job]; !runs {
		return false
	}
	t.open[job]++
	return true
}

// finish ends a job: send is called with its DONE and then the answers to its CANCELs, in one step,
// so that a concurrent CANCEL finds the job either running or reported.
func (t *jobTable) finish(done *ipc.Done, send func(any)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	cancels := t.open[done.Job]
	delete(t.open, done.Job)
	send(done)
	for range cancels {
		send(&ipc.Cancelled{Job: done.Job})
	}
}

// drop removes a job that was not accepted.
func (t *jobTable) drop(job uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.open, job)
}

func (t *jobTable) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.open)
}

// inflight counts the running jobs of all workers; a drain waits for it.
type inflight struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n reaches 0; nil: not waited for
}

func (f *inflight) add() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n++
}

func (f *inflight) done() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n--
	if f.n == 0 && f.idle != nil {
		close(f.idle)
		f.idle = nil
	}
}

func (f *inflight) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n
}

// wait returns when no job runs, or with the context's error.
func (f *inflight) wait(ctx context.Context) error {
	f.mu.Lock()
	if f.n == 0 {
		f.mu.Unlock()
		return nil
	}
	if f.idle == nil {
		f.idle = make(chan struct{})
	}
	idle := f.idle
	f.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
