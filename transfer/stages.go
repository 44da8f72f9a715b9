package transfer

import (
	"fmt"
	"math"
)

// Limits of staged loads.
const (
	MaxStages = 4096 // of one worker
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

// MakeStages returns the stages of a worker's shards, in the order of Config.Shard and
// Config.Others. stages has the stage of each segment, of all groups of all shards in order. There
// are as many stages as the largest number says; one without segments ends with the one before it.
func MakeStages(shards []Held, stages []uint16) (*Stages, error) {
	s := &Stages{}
	for _, n := range stages {
		if s.count = max(s.count, int(n)+1); n >= MaxStages {
			return nil, fmt.Errorf("stage %d is not below %d: %w", n, MaxStages, ErrInvalid)
		}
	}
	for i := range shards {
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

// Count returns the number of stages.
func (s *Stages) Count() int { return s.count }

// Staged says how a load is copied by stages.
type Staged struct {
	*Stages
	// Word is the offset of a word of 8 bytes in the peer's sync region: the number of stages that
	// have arrived. It grows while the load runs, is all stages only if all blocks were verified,
	// and is not written after the load's Completion.
	Word uint64
}

// check returns an error if a staged load does not fit the worker.
func (s *Staged) check(w *Worker, job *Job) error {
	switch {
	case job.Kind != Load:
		return fmt.Errorf("staged: a save, allowed: a load: %w", ErrInvalid)
	case s.Word%8 != 0:
		return fmt.Errorf("staged: word at %d, no multiple of 8: %w", s.Word, ErrInvalid)
	case len(s.held) != len(w.held):
		return fmt.Errorf("staged: stages of %d shards, not %d: %w", len(s.held), len(w.held), ErrInvalid)
	}
	ranges := 0
	for h := range w.held {
		for i := range job.Sections {
			g := int(job.Sections[i].Group)
			if g >= len(s.held[h]) {
				return fmt.Errorf("staged: no stages of group %d: %w", g, ErrInvalid)
			}
			if r := s.held[h][g].ranges; len(r) == 0 || r[len(r)-1].end() != int64(w.held[h].plans[g].bytes) {
				return fmt.Errorf("staged: group %d of shard %d: not the worker's segments: %w", g, w.held[h].shard,
					ErrInvalid)
			}
			ranges += len(s.held[h][g].ranges) * len(job.Sections[i].Blocks)
		}
	}
	if ranges > maxStagedRanges {
		return fmt.Errorf("staged: %d ranges, at most %d: %w", ranges, maxStagedRanges, ErrInvalid)
	}
	return nil
}

// end returns the offset of the first byte after the range in a slot.
func (r *stagedRange) end() int64 { return r.off + int64(r.bytes) }
