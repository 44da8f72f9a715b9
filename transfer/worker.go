package transfer

import (
	"errors"
	"fmt"
	"sync"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
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
		seen    []uint64         // scratch of checkJob: a bit for each block of a group, all clear
	}
}

// Start checks the configuration and starts the worker's threads.
func Start(cfg Config) (*Worker, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	w := &Worker{cfg: cfg, stop: make(chan struct{})}
	most, err := w.plan()
	if err != nil {
		return nil, err
	}
	w.mu.jobs = map[uint64]*task{}
	w.mu.seen = make([]uint64, (uint64(most)+63)/64)
	for _, kind := range []Kind{Save, Load} {
		th := newThread(w, kind)
		w.mu.threads[kind] = th
		w.ended.Go(th.run)
	}
	return w, nil
}

// held is a shard that the worker holds.
type held struct {
	shard  uint8
	plans  []plan            // of each group
	pieces [][]cudaipc.Piece // of each group
}

// plan checks the layouts of all shards, and returns the most blocks of a group.
func (w *Worker) plan() (most uint32, err error) {
	groups := w.cfg.Spec.Groups
	w.bytes, w.runs = make([]int64, len(groups)), make([]int, len(groups))
	for _, s := range append([]Held{{w.cfg.Shard, w.cfg.Layout}}, w.cfg.Others...) {
		h := held{shard: s.Shard}
		for i := range groups {
			g := &s.Layout.Groups[i]
			p, err := makePlan(g, groups[i].ShardBytes[s.Shard])
			if err != nil {
				return 0, fmt.Errorf("groups[%d].%w", i, err)
			}
			if len(w.held) > 0 && p.blocks != w.held[0].plans[i].blocks {
				return 0, fmt.Errorf("groups[%d]: %d blocks of shard %d, %d of shard %d: %w", i, p.blocks, s.Shard,
					w.held[0].plans[i].blocks, w.cfg.Shard, ErrInvalid)
			}
			h.plans, h.pieces = append(h.plans, p), append(h.pieces, piecesOf(g))
			w.bytes[i] += int64(p.bytes)
			w.runs[i] += len(p.segments)
			most = max(most, p.blocks)
		}
		w.held = append(w.held, h)
	}
	return most, nil
}

func (c *Config) check() error {
	switch {
	case c.Device == nil || c.Slots == nil || c.Complete == nil:
		return fmt.Errorf("device, slots and complete must be given: %w", ErrInvalid)
	case c.Integrity != Full && c.Integrity != Header:
		return fmt.Errorf("integrity: %d is neither full nor header: %w", c.Integrity, ErrInvalid)
	}
	if err := c.checkHeld(); err != nil {
		return err
	}
	for i := range c.Spec.Groups {
		if len(c.Spec.Groups[i].ShardBytes) != c.Spec.Shards {
			return fmt.Errorf("groups[%d]: bytes of %d shards, not %d: %w", i, len(c.Spec.Groups[i].ShardBytes),
				c.Spec.Shards, ErrInvalid)
		}
	}
	if c.Limits == (Limits{}) {
		c.Limits = DefaultLimits
	}
	if c.Lanes == nil {
		c.Lanes = NewLanes(2, c.Limits.SaveAge, nil)
	}
	return c.checkSampling()
}

func (c *Config) checkHeld() error {
	var seen [pool.MaxShards]bool
	for _, s := range append([]Held{{c.Shard, c.Layout}}, c.Others...) {
		switch {
		case int(s.Shard) >= c.Spec.Shards || c.Spec.Shards > pool.MaxShards:
			return fmt.Errorf("shard %d of %d, at most %d: %w", s.Shard, c.Spec.Shards, pool.MaxShards, ErrInvalid)
		case seen[s.Shard]:
			return fmt.Errorf("shard %d is there twice: %w", s.Shard, ErrInvalid)
		case len(s.Layout.Groups) != len(c.Spec.Groups):
			return fmt.Errorf("groups: the layout has %d, the space %d: %w", len(s.Layout.Groups), len(c.Spec.Groups),
				ErrInvalid)
		}
		seen[s.Shard] = true
	}
	return nil
}

func (c *Config) checkSampling() error {
	switch {
	case c.Sampling.Every > MaxSampleEvery:
		return fmt.Errorf("sampling.every: %d, allowed: 0 to %d: %w", c.Sampling.Every, MaxSampleEvery, ErrInvalid)
	case c.Sampling.Every > 0 && len(c.Sampling.Arena) == 0:
		return fmt.Errorf("sampling.arena: empty, allowed: the device's: %w", ErrInvalid)
	}
	return nil
}

// Close cancels all jobs and returns when each has been completed and both threads have ended. It
// waits for copies without a time limit, because only their end proves that nothing is touched.
func (w *Worker) Close() {
	w.mu.Lock()
	if !w.mu.closed {
		w.mu.closed = true
		close(w.stop)
	}
	w.mu.Unlock()
	w.ended.Wait()
}

// Limits of one job, equal to the session protocol's.
const (
	MaxSections  = 64
	MaxJobBlocks = 8192
)

// checkJobLocked checks a job against the worker's layout and returns its number of blocks.
func (w *Worker) checkJobLocked(job *Job) (blocks int, err error) {
	if job.Kind != Save && job.Kind != Load {
		return 0, fmt.Errorf("kind %d is neither save nor load: %w", job.Kind, ErrInvalid)
	}
	if w.mu.jobs[job.ID] != nil {
		return 0, fmt.Errorf("a job of this number has not ended: %w", ErrInvalid)
	}
	if len(job.Sections) > MaxSections {
		return 0, fmt.Errorf("sections: %d, at most %d: %w", len(job.Sections), MaxSections, ErrInvalid)
	}
	for i := range job.Sections {
		if err := w.checkSection(&job.Sections[i]); err != nil {
			return 0, fmt.Errorf("sections[%d].%w", i, err)
		}
		if blocks += len(job.Sections[i].Blocks); blocks > MaxJobBlocks {
			return 0, fmt.Errorf("sections[%d]: more than %d blocks in all: %w", i, MaxJobBlocks, ErrInvalid)
		}
	}
	if job.Staged != nil {
		if err := job.Staged.check(w, job); err != nil {
			return 0, err
		}
	}
	if job.Kind == Load {
		err = w.checkTwiceLocked(job.Sections)
	}
	return blocks, err
}

func (w *Worker) checkSection(s *Section) error {
	if int(s.Group) >= len(w.bytes) {
		return fmt.Errorf("group: %d is not below %d: %w", s.Group, len(w.bytes), ErrInvalid)
	}
	if len(s.Parent) > pool.MaxHashLen {
		return fmt.Errorf("parent: %d bytes, at most %d: %w", len(s.Parent), pool.MaxHashLen, ErrInvalid)
	}
	if h := &s.Hashes; h.Len < 1 || h.Len > pool.MaxHashLen {
		return fmt.Errorf("hash_len: %d is not within 1 and %d: %w", h.Len, pool.MaxHashLen, ErrInvalid)
	}
	if s.Hashes.N != len(s.Blocks) {
		return fmt.Errorf("blocks: %d for %d hashes: %w", len(s.Blocks), s.Hashes.N, ErrInvalid)
	}
	if !covered(&s.Hashes) {
		return fmt.Errorf("hashes: the view reaches beyond its %d bytes: %w", len(s.Hashes.Blob), ErrInvalid)
	}
	limit := w.held[0].plans[s.Group].blocks
	for i, b := range s.Blocks {
		if b >= limit {
			return fmt.Errorf("blocks[%d]: %d is not below %d: %w", i, b, limit, ErrInvalid)
		}
	}
	return nil
}

// covered reports whether every hash of the view lies in its blob.
func covered(h *pool.Hashes) bool {
	have := len(h.Blob) / h.Len
	if h.N == 0 {
		return true
	}
	if h.N < 0 || h.First < 0 || h.Step < 0 || h.First >= have || h.Step > have {
		return false
	}
	return h.First+(h.N-1)*max(h.Step, 1) < have // N is at most MaxJobBlocks: does not overflow
}

// checkTwiceLocked refuses a load that names one block twice.
func (w *Worker) checkTwiceLocked(sections []Section) (err error) {
	for group := range w.bytes {
		for i := range sections {
			if int(sections[i].Group) != group {
				continue
			}
			for j, b := range sections[i].Blocks {
				word, bit := &w.mu.seen[b/64], uint64(1)<<(b%64)
				if *word&bit != 0 && err == nil {
					err = fmt.Errorf("sections[%d].blocks[%d]: %d is there twice: %w", i, j, b, ErrInvalid)
				}
				*word |= bit
			}
		}
		w.forgetLocked(sections, group)
	}
	return err
}

func (w *Worker) forgetLocked(sections []Section, group int) {
	for i := range sections {
		if int(sections[i].Group) != group {
			continue
		}
		for _, b := range sections[i].Blocks {
			w.mu.seen[b/64] = 0
		}
	}
}
