package transfer

import (
	"math/rand/v2"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// Sampling is the end-to-end check of some of the blocks that are copied: a sum made where the
// engine's memory is, by another path than the copy's (cudaipc.Summer), is compared with the sum of
// the block's slot.
type Sampling struct {
	Every uint32 // one block in so many, of each direction of a worker; 0: none, 1: all
	Seed  uint64 // of which ones
	Arena []byte // the device's, as this process sees it
	// Mismatch is told of each block that does not match; nil: nobody is. It is called from the
	// worker's threads and must not block.
	Mismatch func(Mismatch)
}

// MaxSampleEvery is the most that Sampling.Every may be.
const MaxSampleEvery = 1_000_000_000

// Mismatch is a block whose engine has other bytes than its slot, with the engine's leave.
type Mismatch struct {
	Job    uint64
	Kind   Kind
	Group  uint8
	Hash   []byte // of the block
	Block  uint32 // the engine's
	Engine uint32 // sum of the engine's memory
	Slot   uint32 // sum that the slot has, or had at its save
	Status pool.Status
}

// SampleCounts are the blocks that were chosen for a check.
type SampleCounts struct {
	Matched, Mismatched uint64
	// Unverified are those that were not summed: too late, the engine died or had given the block
	// up, or the device failed.
	Unverified uint64
}

// suspectBlocks are how many blocks, at least, are all checked after one that did not match.
const suspectBlocks = 1000

// picker chooses the blocks of one direction that are checked: one of each Every in a row, across
// jobs, at a place that is drawn anew each time, so that neither position nor time chooses. After a
// mismatch it chooses all, until suspectBlocks have matched.
type picker struct {
	every   uint32
	left    uint32 // blocks of the row at hand
	at      uint32 // the one that is chosen: left is this then
	suspect int    // blocks that are still all chosen
	random  *rand.Rand
}

func newPicker(s *Sampling, kind Kind) *picker {
	return &picker{every: s.Every, random: rand.New(rand.NewPCG(s.Seed, uint64(kind)))}
}

func (p *picker) next() bool {
	if p.every == 0 {
		return false
	}
	if p.suspect > 0 {
		p.suspect--
		return true
	}
	if p.left == 0 {
		p.left, p.at = p.every, p.random.Uint32N(p.every)
	}
	p.left--
	return p.left == p.at
}

// asked is one sample that is under way: blocks of one group of a flight.
type asked struct {
	group  uint8
	number []int // of each block, in the flight
	sample cudaipc.Sample
	ticket cudaipc.Ticket
	err    error // why the device did not take it
}

// place is where a block of a flight is in the engine.
type place struct {
	group uint8
	block uint32
}

// check starts the check of those blocks of a flight, whose copy has ended, that the picker
// chooses. It says whether there are any.
func (th *thread) check(f *flight) bool {
	return th.picker.every > 0 && th.ask(f, th.picker.next)
}

// ask starts the check of those blocks that arrived, were not checked before, and are chosen.
func (th *thread) ask(f *flight, chosen func() bool) bool {
	for i, status := range f.status {
		if status != pool.OK || f.checked[i] || !chosen() {
			continue
		}
		f.checked[i] = true
		a := th.askFor(f, f.where[i].group)
		a.number = append(a.number, i)
		a.sample.Blocks = append(a.sample.Blocks, cudaipc.SampleBlock{Block: f.where[i].block,
			Seed: f.copy.Blocks[i].Seed})
	}
	for _, a := range f.asked {
		a.ticket, a.err = th.w.summer.Sum(&a.sample)
	}
	return len(f.asked) > 0
}

// askFor gives the sample of a group's blocks.
func (th *thread) askFor(f *flight, group uint8) *asked {
	for _, a := range f.asked {
		if a.group == group {
			return a
		}
	}
	a := &asked{group: group, sample: cudaipc.Sample{
		Peer: th.w.cfg.Peer, Within: th.w.cfg.Limits.SampleWait, Pieces: th.w.pieces[group],
	}}
	f.asked = append(f.asked, a)
	return a
}

// summed is a block of a flight whose engine's memory was summed, unless it is bad.
type summed struct {
	number int // in the flight
	engine uint32
	bad    bool
}

// sums waits until nothing of a flight's samples is under way any more: only then the engine may
// have its memory back.
func (th *thread) sums(f *flight) []summed {
	if len(f.asked) == 0 {
		return nil
	}
	th.enter(Verifying)
	th.summed = th.summed[:0]
	for _, a := range f.asked {
		d, err := th.outcome(a.ticket, a.err)
		for j, i := range a.number {
			s := summed{number: i, bad: err != nil || len(d.Sums) != len(a.number) || (d.Bad != nil && d.Bad[j])}
			if !s.bad {
				s.engine = d.Sums[j]
			}
			th.summed = append(th.summed, s)
		}
	}
	f.asked = f.asked[:0]
	return th.summed
}

// compare holds sums of the engine's memory against the slots'. wanted is false if the engine has
// given the blocks up: it may have used them since, and nothing is known. After a mismatch all
// other blocks of the flight are checked too.
func (th *thread) compare(t *task, f *flight, list []summed, wanted bool) {
	bad := false
	for i := range list {
		s := &list[i]
		slot, ok := uint32(0), wanted && !s.bad
		if ok {
			if slot, ok = th.slotSum(f, s); !ok && th.kind == Save { // nobody could load it
				f.status[s.number] = th.failed(f, s.number)
			}
		}
		switch {
		case !ok:
			t.sample.Unverified++
		case slot == s.engine:
			t.sample.Matched++
		default:
			bad = true
			t.sample.Mismatched++
			th.mismatch(t, f, s, slot)
		}
	}
	if bad {
		th.picker.suspect = suspectBlocks
		th.ask(f, func() bool { return true })
	}
}

// slotSum is the sum that the engine's memory must have. Of a save it is one of the slot from its
// first byte to its last, whatever runs it was copied in, and must be the one that is committed,
// else that one is given. Of a load it is the one that was made at the save.
func (th *thread) slotSum(f *flight, s *summed) (sum uint32, ok bool) {
	stored := f.slots[s.number].Sum
	full := th.w.cfg.Integrity == Full
	if full && (th.kind == Load || stored != s.engine) {
		return stored, true
	}
	return th.sumSlot(f, s.number)
}

// sumSlot sums a slot as it is now.
func (th *thread) sumSlot(f *flight, number int) (sum uint32, ok bool) {
	s := &f.slots[number]
	sum, err := cudaipc.SumBytes(f.copy.Blocks[number].Seed, th.w.cfg.Sampling.Arena, s.Off, int64(s.Len))
	return sum, err == nil
}

// mismatch gives a block up that is not in the slot, or in the engine, as it is on the other side.
// A stored block goes with it, unless it is seen to be as it was saved: then the copy or the
// engine's memory is at fault, and others may have the block.
func (th *thread) mismatch(t *task, f *flight, s *summed, slot uint32) {
	status := Failed
	if th.kind == Load {
		if sum, ok := th.sumSlot(f, s.number); !ok || th.w.cfg.Integrity != Full || sum != f.slots[s.number].Sum {
			status = pool.Corrupt
		}
	}
	f.status[s.number] = status
	if told := th.w.cfg.Sampling.Mismatch; told != nil {
		number, at := f.number[s.number], f.where[s.number]
		told(Mismatch{
			Job: t.job.ID, Kind: th.kind, Group: at.group, Hash: t.job.hash(number), Block: at.block,
			Engine: s.engine, Slot: slot, Status: status,
		})
	}
}

// hash is that of a block of the job, by its number.
func (j *Job) hash(number int) []byte {
	for i := range j.Sections {
		h := &j.Sections[i].Hashes
		if number < h.N {
			return h.At(number)
		}
		number -= h.N
	}
	return nil
}

// piecesOf gives a group's segments as a device is told them for samples: as the registration has
// them, none merged.
func piecesOf(g *GroupLayout) []cudaipc.Piece {
	out := make([]cudaipc.Piece, len(g.Segments))
	for i, s := range g.Segments {
		out[i] = cudaipc.Piece{Region: s.Region, Offset: s.Offset, Stride: s.Stride, Bytes: s.Bytes}
	}
	return out
}
