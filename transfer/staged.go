package transfer

import (
	"fmt"
	"math"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer/pace"
)

// A staged load pins all of its blocks, waits for the step in flight, and copies stage by stage:
//
//	pin ─▶ await the step ─▶ stage 0, word = 1 ─▶ ... ─▶ stage n-1, compare, word = n ─▶ sample
//
// Each range is summed while it is copied. Before the last stage counts, the sums of each block are
// combined to that of the whole block and compared with the one of its save. One block that fails
// ends the load: those that have not arrived are Cancelled, and the word does not grow any more.

// staged is a staged load in progress.
type staged struct {
	*Staged
	*flight            // all blocks; only its batches are copied
	rangeSums []uint32 // of all blocks, as they were copied
	first     []int    // of each block, in rangeSums
	counted   int      // what the word is
}

// stageCursor is the start of the next batch of a staged load.
type stageCursor struct{ stage, block, rng int } // rng is an index of stagedGroup.byStage

func (th *thread) loadStaged(t *task) {
	l := &staged{Staged: t.job.Staged, flight: th.spare()}
	status := th.pinAll(t, l)
	if status == pool.OK {
		status = th.await(t)
	}
	if status == pool.OK {
		var c stageCursor
		l.skip(&c)
		status = th.batches(t, batchOps{ // which wait for no use of the stages before: each byte has its own place
			more:   func() bool { return c.stage < l.count },
			launch: func(lane *ticket) pool.Status { return th.launchStage(t, l, &c, lane) },
			finish: func(t *task, f *flight, before pool.Status) pool.Status { return th.finishStage(t, l, f, before) },
		})
	}
	if status == pool.OK && th.check(l.flight) {
		for len(l.samples) > 0 {
			th.sums(l.flight)
			th.compare(t, l.flight, true)
		}
	}
	if status != pool.OK {
		for i := range l.status {
			if l.status[i] == pool.OK {
				l.status[i] = status
			}
		}
	}
	th.release(t, l.flight)
	th.recycle(l.flight)
}

// pinAll pins all blocks; unless all are there and of this epoch, it returns the others' status.
func (th *thread) pinAll(t *task, l *staged) pool.Status {
	th.enter(Reserving)
	status, number := pool.OK, 0
	for i := range t.job.Sections {
		s := &t.job.Sections[i]
		for h := range th.w.held {
			p := span{s, h, 0, len(s.Blocks), t.index(h, number)}
			b := th.batch(t, &p)
			th.w.cfg.Slots.Acquire(&b)
			if !th.add(l.flight, &p, &b, true) {
				status = Cancelled
			}
		}
		number += len(s.Blocks)
	}
	for i := range l.slots {
		l.first = append(l.first, len(l.rangeSums))
		l.rangeSums = append(l.rangeSums, make([]uint32, len(l.ranges(i)))...)
	}
	if th.stale(t) { // as in beginLoad, while the blocks are pinned
		t.setFrom(0, pool.Stale)
		return pool.Stale
	}
	return status
}

func (l *staged) ranges(i int) []stagedRange { return l.held[l.where[i].held][l.where[i].group].ranges }

// skip moves the cursor to the next range, past what has none.
func (l *staged) skip(c *stageCursor) {
	for c.stage < l.count {
		if c.block == len(l.slots) {
			c.stage, c.block, c.rng = c.stage+1, 0, 0
			continue
		}
		if c.rng < len(l.stage(c)) {
			return
		}
		c.block, c.rng = c.block+1, 0
	}
}

// stage returns the indexes of the ranges of the cursor's block in its stage.
func (l *staged) stage(c *stageCursor) []int {
	at := &l.where[c.block]
	return l.held[at.held][at.group].byStage[c.stage]
}

// launchStage begins the copy of the next ranges of one stage: at least one, and else at most
// Limits.BatchBytes and maxBatchRuns.
func (th *thread) launchStage(t *task, l *staged, c *stageCursor, lane *ticket) pool.Status {
	f := th.spare()
	f.lane = lane
	room := th.w.cfg.Limits.BatchBytes
	for stage := c.stage; c.stage == stage && len(f.copy.Runs) < maxBatchRuns; l.skip(c) {
		index := l.stage(c)[c.rng]
		r := &l.ranges(c.block)[index]
		if room -= int64(r.bytes); room < 0 && len(f.copy.Blocks) > 0 {
			break
		}
		before := len(f.copy.Runs)
		f.copy.Runs = r.runs(f.copy.Runs, l.where[c.block].block, l.slots[c.block].Off+r.off)
		f.copy.Blocks = append(f.copy.Blocks, cudaipc.Block{Runs: uint32(len(f.copy.Runs) - before)})
		f.number = append(f.number, c.block)
		f.at = append(f.at, l.first[c.block]+index)
		c.rng++
	}
	f.landed = c.stage
	th.begin(t, f, pace.Urgent, 0)
	return pool.OK
}

// finishStage waits for a copy, keeps its sums, and counts the stages that it completes, unless one
// before it has failed.
func (th *thread) finishStage(t *task, l *staged, f *flight, before pool.Status) pool.Status {
	bad := th.copied(t, f)
	result := before
	for i, block := range f.number {
		switch {
		case bad != nil && bad[i]:
			l.status[block] = th.failureStatus(&l.slots[block])
		case f.copy.Sum:
			l.rangeSums[f.at[i]] = f.sums[i]
		}
		if l.status[block] != pool.OK {
			result = Cancelled
		}
	}
	if result != pool.OK || f.landed == l.counted {
		return result
	}
	l.counted = f.landed
	if l.counted == l.count && th.w.cfg.Integrity == Full && !l.whole() {
		return Cancelled
	}
	if th.w.cfg.Peer.SetWord(l.Word, uint64(l.counted)) != nil {
		return Failed
	}
	return pool.OK
}

// whole compares the sums of the copied blocks with those of their saves; false: some differ.
func (l *staged) whole() bool {
	equal := true
	for i := range l.slots {
		sum := l.copy.Blocks[i].Seed
		ranges := l.ranges(i)
		for r := range ranges {
			sum = combine(sum, l.rangeSums[l.first[i]+r], ranges[r].shift)
		}
		if sum != l.slots[i].Sum {
			l.status[i] = pool.Corrupt
			equal = false
		}
	}
	return equal
}

// Limits of staged loads.
const (
	MaxStages    = 4096    // of one worker
	maxStageRows = 1 << 20 // stages of all groups of all shards, which take 24 bytes each
	// maxStagedRanges bounds the ranges of all blocks of one staged load, each of which takes 4
	// bytes of memory while it runs.
	maxStagedRanges = 1 << 22
)

// Stages cut the blocks of a worker into parts that a load copies one after the other, each for
// all blocks, so that an engine can use the first ones early: a stage usually is one layer.
type Stages struct {
	count int
	held  [][]stagedGroup // by index of the shard, then group
}

// stagedGroup is a group's layout in one shard, by stages.
type stagedGroup struct {
	ranges  []stagedRange // in the order of a block's bytes
	byStage [][]int       // by stage: the indexes of its ranges
}

// stagedRange is some consecutive segments of one stage.
type stagedRange struct {
	plan
	off   int64  // of the range in a slot
	shift uint32 // shiftOf its bytes
}

// MakeStages returns the stages of a worker's shards, in the order of Config.Held.
// stages has the stage of each segment, of all groups of all shards in order. There
// are as many stages as the largest number says; one without segments ends with the one before it.
func MakeStages(shards []Held, stages []uint16) (*Stages, error) {
	s := &Stages{}
	for _, n := range stages {
		if s.count = max(s.count, int(n)+1); n >= MaxStages {
			return nil, fmt.Errorf("stage %d is not below %d: %w", n, MaxStages, ErrInvalid)
		}
	}
	rows := 0
	for i := range shards {
		if rows += s.count * len(shards[i].Layout.Groups); rows > maxStageRows {
			return nil, fmt.Errorf("%d stages of %d shards: %w", s.count, len(shards), ErrInvalid)
		}
		groups := make([]stagedGroup, len(shards[i].Layout.Groups))
		for g := range groups {
			layout := &shards[i].Layout.Groups[g]
			n := len(layout.Segments)
			if n > len(stages) {
				return nil, fmt.Errorf("no stage of segment %d of group %d of shard %d: %w", len(stages), g,
					shards[i].Shard, ErrInvalid)
			}
			groups[g] = stageGroup(layout, stages[:n], s.count)
			stages = stages[n:]
		}
		s.held = append(s.held, groups)
	}
	if len(stages) > 0 {
		return nil, fmt.Errorf("%d more than segments: %w", len(stages), ErrInvalid)
	}
	return s, nil
}

func stageGroup(layout *GroupLayout, stages []uint16, count int) stagedGroup {
	g := stagedGroup{byStage: make([][]int, count)}
	off := int64(0)
	for i := range layout.Segments {
		segment := &layout.Segments[i]
		last := len(g.ranges) - 1
		if last < 0 || stages[i] != stages[i-1] || uint64(g.ranges[last].bytes)+uint64(segment.Bytes) > math.MaxUint32 {
			last++
			g.ranges = append(g.ranges, stagedRange{off: off})
			g.byStage[stages[i]] = append(g.byStage[stages[i]], last)
		}
		r := &g.ranges[last]
		r.add(segment)
		r.bytes += segment.Bytes
		off += int64(segment.Bytes)
	}
	for i := range g.ranges {
		g.ranges[i].shift = shiftOf(g.ranges[i].bytes)
	}
	return g
}

// Staged says how a load is copied by stages.
type Staged struct {
	*Stages
	// Word is the offset of a word of 8 bytes in the peer's sync region: the number of stages that
	// have arrived. It grows while the load runs, is all stages only if all blocks were verified,
	// and is not written after the load's Completion.
	Word uint64
}

// check refuses a load of too many ranges. That the stages are the worker's is the caller's care.
func (s *Staged) check(job *Job) error {
	ranges := 0
	for _, groups := range s.held {
		for i := range job.Sections {
			ranges += len(groups[job.Sections[i].Group].ranges) * len(job.Sections[i].Blocks)
		}
	}
	if ranges > maxStagedRanges {
		return fmt.Errorf("staged: %d ranges, at most %d: %w", ranges, maxStagedRanges, ErrInvalid)
	}
	return nil
}
