// Package running holds the jobs of one session that run.
package running

import (
	"sync"

	"github.com/kvagent/kvagent/ipc"
)

// Table holds the running jobs of one session, so that no number is used twice at once, and how
// many CANCELs wait for each: they are answered after the job's DONE.
type Table struct {
	mu   sync.Mutex
	open map[uint64]int // by job: CANCELs to answer
}

// Add enters a job. It returns false if its number is taken.
func (t *Table) Add(job uint64) bool {
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

// Cancel notes that a CANCEL waits for the job. It returns false if the job does not run.
func (t *Table) Cancel(job uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, runs := t.open[job]; !runs {
		return false
	}
	t.open[job]++
	return true
}

// Finish ends a job: send is called with its DONE and then the answers to its CANCELs, in one step,
// so that a concurrent CANCEL finds the job either running or reported.
func (t *Table) Finish(done *ipc.Done, send func(any)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	cancels := t.open[done.Job]
	delete(t.open, done.Job)
	send(done)
	for range cancels {
		send(&ipc.Cancelled{Job: done.Job})
	}
}

// Drop removes a job that was not accepted.
func (t *Table) Drop(job uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.open, job)
}

// Count returns the number of jobs.
func (t *Table) Count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.open)
}
