package transfer

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// ErrClosed is what Submit returns after Close.
var ErrClosed = errors.New("worker closed")

// Worker moves the blocks of one engine worker: two threads, one for saves and one for loads, each
// with a bounded queue and one job at a time. All methods may be called concurrently, but only
// State from within Config.Complete.
type Worker struct {
	cfg   Config
	held  []held
	bytes []int64 // by group: bytes of a block of all shards held
	runs  []int   // by group: their runs
	stop  chan struct{}
	ended sync.WaitGroup

	mu struct {
		sync.Mutex
		closed  bool
		jobs    map[uint64]*task // submitted and not completed
		threads [2]*thread       // by Kind; their queues and states are under this mutex
	}
}

// Start checks the layouts and starts the worker's threads.
func Start(cfg Config) (*Worker, error) {
	if cfg.Limits == (Limits{}) {
		cfg.Limits = DefaultLimits
	}
	if cfg.Lanes == nil {
		cfg.Lanes = NewLanes(2, cfg.Limits.SaveAge, nil)
	}
	w := &Worker{cfg: cfg, stop: make(chan struct{})}
	if err := w.plan(); err != nil {
		return nil, err
	}
	w.mu.jobs = map[uint64]*task{}
	for _, kind := range []Kind{Save, Load} {
		th := &thread{
			w: w, kind: kind, more: sync.NewCond(&w.mu), phase: Idle, since: time.Now(),
			picker: newPicker(&w.cfg.Sampling, kind),
		}
		w.mu.threads[kind] = th
		w.ended.Go(th.run)
	}
	return w, nil
}

// held is a shard that the worker holds.
type held struct {
	shard  uint8
	plans  []plan        // of each group
	layout []GroupLayout // as registered, not merged: for samples
}

// plan checks the layouts of all shards, which have the same number of blocks.
func (w *Worker) plan() error {
	groups := w.cfg.Spec.Groups
	w.bytes, w.runs = make([]int64, len(groups)), make([]int, len(groups))
	for _, s := range w.cfg.Held {
		h := held{shard: s.Shard, layout: s.Layout.Groups}
		for i := range groups {
			g := &s.Layout.Groups[i]
			p, err := makePlan(g, groups[i].ShardBytes[s.Shard])
			if err != nil {
				return fmt.Errorf("groups[%d].%w", i, err)
			}
			h.plans = append(h.plans, p)
			w.bytes[i] += int64(p.bytes)
			w.runs[i] += len(p.segments)
		}
		w.held = append(w.held, h)
	}
	return nil
}

// Close cancels all jobs and returns when each has been completed and both threads have ended. It
// waits for copies without a time limit, because only their end proves that nothing is touched.
func (w *Worker) Close() {
	w.mu.Lock()
	var queued []*task
	if !w.mu.closed {
		w.mu.closed = true
		close(w.stop)
		for _, th := range w.mu.threads {
			queued, th.queue = append(queued, th.queue...), nil
			th.more.Signal()
		}
	}
	w.mu.Unlock()
	for _, t := range queued {
		t.setFrom(0, Cancelled)
		w.report(t)
	}
	w.ended.Wait()
}

// checkJobLocked checks a job against the worker's layout and returns its number of blocks. Package
// ipc has checked what does not depend on that.
func (w *Worker) checkJobLocked(job *Job) (blocks int, err error) {
	if w.mu.jobs[job.ID] != nil {
		return 0, fmt.Errorf("a job of this number has not ended: %w", ErrInvalid)
	}
	for i := range job.Sections {
		if err := w.checkSection(&job.Sections[i]); err != nil {
			return 0, fmt.Errorf("sections[%d].%w", i, err)
		}
		blocks += len(job.Sections[i].Blocks)
	}
	if job.Staged != nil {
		if err := job.Staged.check(job); err != nil {
			return 0, err
		}
	}
	if job.Kind == Load {
		err = checkTwice(job.Sections, blocks)
	}
	return blocks, err
}

func (w *Worker) checkSection(s *Section) error {
	if int(s.Group) >= len(w.bytes) {
		return fmt.Errorf("group: %d is not below %d: %w", s.Group, len(w.bytes), ErrInvalid)
	}
	limit := w.held[0].plans[s.Group].blocks
	for i, b := range s.Blocks {
		if b >= limit {
			return fmt.Errorf("blocks[%d]: %d is not below %d: %w", i, b, limit, ErrInvalid)
		}
	}
	return nil
}

// checkTwice refuses a load that names one block twice.
func checkTwice(sections []Section, blocks int) error {
	all := make([]uint64, 0, blocks)
	for i := range sections {
		for _, b := range sections[i].Blocks {
			all = append(all, uint64(sections[i].Group)<<32|uint64(b))
		}
	}
	slices.Sort(all)
	for i := 1; i < len(all); i++ {
		if all[i] == all[i-1] {
			return fmt.Errorf("group %d: block %d is there twice: %w", all[i]>>32, uint32(all[i]), ErrInvalid)
		}
	}
	return nil
}
