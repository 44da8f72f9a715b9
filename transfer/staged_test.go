package transfer

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// stageOrder is the stage of each segment of a station's block: not in the order of the slot.
var stageOrder = []uint16{1, 0, 2, 2}

const stageCount = 3

// word returns the word of a station's staged loads.
func (s *station) word() uint64 { return atomic.LoadUint64(s.engine.StageWord(0)) }

// staged returns a load by stages, with its word set to 0 as an engine does.
func (s *station) staged(id uint64, order []uint16, sections ...Section) Job {
	s.t.Helper()
	stages, err := MakeStages([]Held{{0, layout()}}, order)
	if err != nil {
		s.t.Fatal(err)
	}
	atomic.StoreUint64(s.engine.StageWord(0), 0)
	j := load(id, sections...)
	j.Staged = &Staged{Stages: stages, Word: s.engine.StageWords()}
	return j
}

// flip changes a byte of a stored block in the pool.
func (s *station) flip(hash, off int) {
	arena, _ := s.pool.Arena()
	b := pool.Batch{Space: s.space, Hashes: pool.Chain(chain(hash, 1), hashLen), Status: make([]pool.Status, 1),
		Slots: make([]pool.Slot, 1)}
	s.pool.Acquire(&b)
	arena[b.Slots[0].Off+int64(off)] ^= 4
	s.pool.Release(b.Slots, b.Status)
}

// segments returns the segments of an engine's block.
func (s *station) segments(block uint32) (list [pieces][]byte) {
	b := s.read(block)
	for i := range list {
		list[i] = b[i*piece : (i+1)*piece]
	}
	return list
}

// arrived returns which stages of a block have the bytes of a seed.
func (s *station) arrived(block uint32, seed uint64) (stages [stageCount]bool) {
	want := bytesOf(seed)
	for i := range stages {
		stages[i] = true
	}
	for i, segment := range s.segments(block) {
		if !bytes.Equal(segment, want[i*piece:(i+1)*piece]) {
			stages[stageOrder[i]] = false
		}
	}
	return stages
}

// stageGate is a peer that calls before for each copy, with its number from 0 on, before the
// real one gets it. It counts the words that were written.
type stageGate struct {
	cudaipc.Peer
	before func(n int, c *cudaipc.Copy)
	copies atomic.Int32
	words  []uint64
}

func (g *stageGate) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	if c.Dir == cudaipc.Scatter {
		g.before(int(g.copies.Load()), c)
		g.copies.Add(1)
	}
	return g.Peer.Copy(c)
}

func (g *stageGate) SetWord(off, value uint64) error {
	g.words = append(g.words, value)
	return g.Peer.SetWord(off, value)
}

// withGate joins a station whose loads call before for each copy, one at a time, and stores blocks
// from 0 on in it.
func withGate(t *testing.T, stored int, before func(s *station, n int, c *cudaipc.Copy)) (*station, *stageGate) {
	t.Helper()
	n := newNode(t, 64)
	var s *station
	g := &stageGate{}
	g.before = func(n int, c *cudaipc.Copy) { before(s, n, c) }
	s = n.join(t, func(c *Config) {
		g.Peer, c.Peer = c.Peer, g
		c.Limits = DefaultLimits
		c.Limits.Batches = 1
	})
	s.fill(0, stored)
	return s, g
}

// TestStagesArriveInOrder expects the first stages to be usable while the last one is not there: at
// the copy of stage k the word is k, and stages before k have their bytes in all blocks.
func TestStagesArriveInOrder(t *testing.T) {
	var seen []uint64
	s, g := withGate(t, 8, func(s *station, n int, _ *cudaipc.Copy) {
		word := s.word()
		seen = append(seen, word)
		for block := range uint32(8) {
			for stage, there := range s.arrived(100+block, uint64(1000+block)) {
				if there != (stage < int(word)) {
					t.Errorf("copy %d, word %d: stage %d of block %d there: %v", n, word, stage, block, there)
				}
			}
		}
	})
	s.finish(s.staged(2, stageOrder, section(0, 5, 100), section(5, 3, 105)), pool.OK)
	for block := range uint32(8) {
		s.expect(100+block, uint64(1000+block), "after a load by stages")
	}
	if want := []uint64{0, 1, 2}; !slices.Equal(seen, want) {
		t.Errorf("the word was %v at the copies, want %v", seen, want)
	}
	if want := []uint64{1, 2, 3}; !slices.Equal(g.words, want) || s.word() != 3 {
		t.Errorf("the words written were %v, want %v", g.words, want)
	}
}

// TestStagedLoadOfACorruptBlock expects a block that is not what was stored to be found before the
// last stage counts, wherever it differs, and to be dropped.
func TestStagedLoadOfACorruptBlock(t *testing.T) {
	for segment := range pieces {
		s, _ := withGate(t, 4, func(*station, int, *cudaipc.Copy) {})
		s.flip(2, segment*piece+7)
		s.submit(s.staged(2, stageOrder, section(0, 4, 100)))
		if c := s.completion(); c.Status[2] != pool.Corrupt || !slices.Contains(c.Status, Cancelled) {
			t.Errorf("segment %d: statuses %v, want the third corrupt", segment, c.Status)
		}
		if s.word() != stageCount-1 {
			t.Errorf("segment %d: the word is %d, want %d: the last stage counts", segment, s.word(), stageCount-1)
		}
		if n := s.stored(0, 4); n != 2 {
			t.Errorf("segment %d: %d blocks are found, want the 2 before the corrupt one", segment, n)
		}
	}
}

// TestStagedCopyOfOtherBytes changes a slot while the load runs, after its first stage has arrived.
// It expects the last stage not to count.
func TestStagedCopyOfOtherBytes(t *testing.T) {
	s, _ := withGate(t, 4, func(s *station, n int, _ *cudaipc.Copy) {
		if n == 1 {
			s.flip(1, blockSize-1)
		}
	})
	s.submit(s.staged(2, stageOrder, section(0, 4, 100)))
	if c := s.completion(); c.Status[1] != pool.Corrupt || s.word() != stageCount-1 {
		t.Errorf("statuses %v, the word is %d, want the second corrupt and %d", c.Status, s.word(), stageCount-1)
	}
}

// TestStagesAfterAFailedOne has two copies of one stage in flight, of which the first fails. It
// expects the stage not to count when the second ends.
func TestStagesAfterAFailedOne(t *testing.T) {
	n := newNode(t, 64)
	g := &stageGate{before: func(n int, c *cudaipc.Copy) {
		if n == 0 {
			c.Runs[0].Region = 9 // which is not there
		}
	}}
	s := n.join(t, func(c *Config) {
		g.Peer, c.Peer = c.Peer, g
		c.Limits = DefaultLimits
		c.Limits.BatchBytes = piece // one block in each copy
	})
	s.fill(0, 2)
	s.submit(s.staged(2, stageOrder, section(0, 2, 100)))
	c := s.completion()
	if c.Status[0] != Failed || c.Status[1] != Cancelled || g.copies.Load() < 2 || len(g.words) > 0 {
		t.Errorf("statuses %v, %d copies, the words written were %v, want none", c.Status, g.copies.Load(), g.words)
	}
}

// TestStagedLoadCancelledInTheMiddle cancels between two stages. It expects the rest not to be
// copied.
func TestStagedLoadCancelledInTheMiddle(t *testing.T) {
	s, g := withGate(t, 4, func(s *station, n int, _ *cudaipc.Copy) {
		if n == 1 {
			s.worker.Cancel(2)
		}
	})
	s.finish(s.staged(2, stageOrder, section(0, 4, 100)), Cancelled)
	if g.copies.Load() != 2 || s.word() > 2 {
		t.Errorf("%d copies, the word is %d, want 2 and at most 2", g.copies.Load(), s.word())
	}
	s.finish(s.staged(3, stageOrder, section(0, 4, 100)), pool.OK)
}

// TestStagedLoadOfAMissingBlock expects a load with a block that is not stored to copy nothing.
func TestStagedLoadOfAMissingBlock(t *testing.T) {
	s, g := withGate(t, 3, func(*station, int, *cudaipc.Copy) {})
	s.submit(s.staged(2, stageOrder, section(0, 4, 100)))
	want := []pool.Status{Cancelled, Cancelled, Cancelled, pool.Missing}
	if c := s.completion(); !slices.Equal(c.Status, want) || g.copies.Load() > 0 || s.word() != 0 {
		t.Errorf("statuses %v, %d copies, want %v and none", c.Status, g.copies.Load(), want)
	}
}

// TestStagedLoadOfAnOldEpoch expects a load of an ended epoch to be stale as a whole.
func TestStagedLoadOfAnOldEpoch(t *testing.T) {
	s, g := withGate(t, 4, func(*station, int, *cudaipc.Copy) {})
	j := s.staged(2, stageOrder, section(0, 4, 100))
	j.Epoch = 0
	s.finish(j, pool.Stale)
	if g.copies.Load() > 0 {
		t.Errorf("%d copies, want none", g.copies.Load())
	}
}

// TestStagedLoadAwaitsTheStep expects no byte to be copied before the step in flight has ended.
func TestStagedLoadAwaitsTheStep(t *testing.T) {
	s, g := withGate(t, 4, func(*station, int, *cudaipc.Copy) {})
	letGo := s.hold(func() {})
	s.stream.Record(0)
	j := s.staged(2, stageOrder, section(0, 4, 100))
	j.Event = 0
	s.submit(j)
	s.reaches(Load, WaitingEvent, "the load did not wait for the step")
	if g.copies.Load() > 0 || s.word() != 0 {
		t.Errorf("%d copies before the step has ended", g.copies.Load())
	}
	letGo()
	s.ends(2, pool.OK)
}

// TestStagedLoadIsSampled has every block checked and expects wrong bytes in the engine's memory to
// be found, although every stage has counted.
func TestStagedLoadIsSampled(t *testing.T) {
	n := newNode(t, 64)
	var s *station
	g := &stageGate{before: func(int, *cudaipc.Copy) {}}
	found := 0
	s = n.join(t, func(c *Config) {
		g.Peer, c.Peer = c.Peer, &misplacing{stageGate: g}
		arena, _ := n.pool.Arena()
		c.Sampling = Sampling{Every: 1, Arena: arena, Mismatch: func(Mismatch) { found++ }}
	})
	s.fill(0, 4)
	s.submit(s.staged(2, stageOrder, section(0, 4, 100)))
	if c := s.completion(); slices.Contains(c.Status, pool.OK) || found != 4 || c.Sample.Mismatched != 4 {
		t.Errorf("statuses %v, %d mismatches (%+v), want all 4 blocks to have failed", c.Status, found, c.Sample)
	}
}

// misplacing is a device that writes the runs of loads one engine block too far.
type misplacing struct{ *stageGate }

func (m *misplacing) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	if c.Dir == cudaipc.Scatter {
		for i := range c.Runs {
			c.Runs[i].RegionOff += 8 * piece
		}
	}
	return m.stageGate.Copy(c)
}

// TestStagesOfAllKinds loads with random stages and batches and expects the bytes to arrive.
func TestStagesOfAllKinds(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for round := range 20 {
		s := newNode(t, 64).join(t, func(c *Config) {
			c.Limits = DefaultLimits
			c.Limits.BatchBytes = 1 + random.Int64N(4*blockSize)
			if round%4 == 0 {
				c.Integrity = Header
			}
		})
		s.fill(0, 8)
		order := make([]uint16, pieces)
		for i := range order {
			order[i] = uint16(random.IntN(6))
		}
		s.finish(s.staged(2, order, section(0, 3, 100), section(3, 5, 110)), pool.OK)
		for i := range uint32(8) {
			block := 100 + i
			if i >= 3 {
				block = 110 + i - 3
			}
			s.expect(block, uint64(1000+i), "by stages")
		}
		if want := uint64(slices.Max(order)) + 1; s.word() != want {
			t.Errorf("stages %v: the word is %d, want %d", order, s.word(), want)
		}
	}
}

// TestStagesAreRefused expects stages that do not fit the layout, and jobs that they do not fit, to
// be refused.
func TestStagesAreRefused(t *testing.T) {
	shards := []Held{{0, layout()}}
	for what, order := range map[string][]uint16{
		"too few": {0, 1, 2}, "too many": {0, 1, 2, 3, 4}, "none": nil, "too high": {0, 1, 2, MaxStages},
	} {
		if _, err := MakeStages(shards, order); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", what, err)
		}
	}
	many, far := make([]Held, 300), make([]uint16, 300*len(stageOrder))
	for i := range many {
		many[i] = shards[0]
	}
	far[0] = MaxStages - 1
	if _, err := MakeStages(many, far); !errors.Is(err, ErrInvalid) {
		t.Errorf("stages of many shards: %v, want ErrInvalid", err)
	}
	s := newNode(t, 64).join(t, nil)
	s.fill(0, 1)
	j := s.staged(10, stageOrder, section(0, 1, 100))
	j.Staged.Word = 1 << 40
	s.finish(j, Failed)
}
