package transfer

import (
	"math/rand/v2"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// Sampling is the end-to-end check of some of the blocks that are copied: a sum made where the
// engine's memory is, by another path than the copy's (cudaipc.Peer.Sum), is compared with the
// sum of the block's slot.
type Sampling struct {
	Every uint32 // one block in so many, of each direction of a worker; 0: none, 1: all
	Seed  uint64 // of the choice
	Arena []byte // the device's, as mapped in this process
	// Mismatch is called for each block that does not match, unless it is nil. The worker's threads
	// call it; it must not block.
	Mismatch func(Mismatch)
}

// MaxSampleEvery bounds Sampling.Every.
const MaxSampleEvery = 1_000_000_000

// Mismatch is a block whose bytes differ between the engine's memory and the slot, although the
// engine has not changed it.
type Mismatch struct {
	Job    uint64
	Kind   Kind
	Group  uint8
	Hash   []byte // of the block
	Block  uint32 // the engine's
	Engine uint32 // sum of the engine's memory
	Slot   uint32 // sum of the slot now, or at its save
	Status pool.Status
}

// SampleCounts are the blocks that were chosen for a check.
type SampleCounts struct {
	Matched    uint64 `json:"matched"`
	Mismatched uint64 `json:"mismatched"` // the engine has other bytes than the pool
	// Unverified blocks were not summed: it took too long, the engine died or revoked the block, or
	// the device failed.
	Unverified uint64 `json:"unverified"`
}

// suspectBlocks is the least number of blocks that are all checked after a mismatch.
const suspectBlocks = 1000

// picker chooses the blocks of one direction that are checked: one of each Every consecutive
// blocks, across jobs, at a random position, so that the choice depends on neither position nor
// time. After a mismatch it chooses all, until suspectBlocks have matched.
type picker struct {
	every   uint32
	left    uint32 // blocks left of the current row
	at      uint32 // value of left at which the block is chosen
	suspect int    // number of next blocks that are all chosen
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

// sampleRequest is one sample in flight: blocks of one shard and group of a flight.
type sampleRequest struct {
	held   int
	group  uint8
	number []int // of each block, in the flight
	sample cudaipc.Sample
	ticket cudaipc.Ticket
	done   cudaipc.Done
	err    error // why the device did not take it, or it has failed
}

// place is the location of a block of a flight in the engine.
type place struct {
	held  int // index of the shard
	group uint8
	block uint32
}

// check starts the check of the blocks that the picker chooses of a flight whose copy has ended. It
// reports whether there are any.
func (th *thread) check(f *flight) bool {
	return th.picker.every > 0 && th.startSamples(f, th.picker.next)
}

// startSamples starts the check of the chosen blocks that were copied and not checked before.
func (th *thread) startSamples(f *flight, chosen func() bool) bool {
	for i, status := range f.status {
		if status != pool.OK || f.checked[i] || !chosen() {
			continue
		}
		f.checked[i] = true
		a := th.sampleFor(f, &f.where[i])
		a.number = append(a.number, i)
		a.sample.Blocks = append(a.sample.Blocks, cudaipc.SampleBlock{Block: f.where[i].block,
			Seed: f.copy.Blocks[i].Seed})
	}
	for _, a := range f.samples {
		a.ticket, a.err = th.w.cfg.Peer.Sum(&a.sample)
	}
	return len(f.samples) > 0
}

// sampleFor returns the flight's sample of the blocks of a shard and group.
func (th *thread) sampleFor(f *flight, at *place) *sampleRequest {
	for _, a := range f.samples {
		if a.held == at.held && a.group == at.group {
			return a
		}
	}
	a := &sampleRequest{held: at.held, group: at.group, sample: cudaipc.Sample{
		Within: th.w.cfg.Limits.SampleWait, Pieces: th.w.held[at.held].layout[at.group].Segments,
	}}
	f.samples = append(f.samples, a)
	return a
}

// sums waits for a flight's samples, before whose end the engine may not reuse its memory.
func (th *thread) sums(f *flight) {
	for _, a := range f.samples {
		th.enter(Verifying)
		a.done, a.err = th.outcome(a.ticket, a.err)
	}
}

// compare compares the sums of the engine's memory with the slots'. wanted is false if the engine
// has revoked the blocks: it may have overwritten them, so they stay unverified. After a mismatch
// all other blocks of the flight are checked too.
func (th *thread) compare(t *task, f *flight, wanted bool) {
	if len(f.samples) > 0 {
		defer t.clock.checked()
	}
	bad := false
	for _, a := range f.samples {
		failed := !wanted || a.err != nil || len(a.done.Sums) != len(a.number)
		for j, i := range a.number {
			if failed || a.done.Bad != nil && a.done.Bad[j] {
				t.sample.Unverified++
				continue
			}
			engine := a.done.Sums[j]
			slot, ok := th.slotSum(f, i, engine)
			switch {
			case !ok:
				t.sample.Unverified++
				if th.kind == Save { // it could not be loaded
					f.status[i] = th.failureStatus(&f.slots[i])
				}
			case slot == engine:
				t.sample.Matched++
			default:
				bad = true
				t.sample.Mismatched++
				th.mismatch(t, f, i, engine, slot)
			}
		}
	}
	if f.samples = f.samples[:0]; bad {
		th.picker.suspect = suspectBlocks
		th.startSamples(f, func() bool { return true })
	}
}

// slotSum returns the sum that the engine's memory must have. For a save it is the sum of the whole
// slot, independent of the copy's runs; if the sum to commit differs from the engine's, it is that
// one. For a load it is the sum made at the save.
func (th *thread) slotSum(f *flight, number int, engine uint32) (sum uint32, ok bool) {
	stored := f.slots[number].Sum
	if th.w.cfg.Integrity == Full && (th.kind == Load || stored != engine) {
		return stored, true
	}
	return th.sumSlot(f, number)
}

func (th *thread) sumSlot(f *flight, number int) (sum uint32, ok bool) {
	s := &f.slots[number]
	sum, err := cudaipc.SumBytes(f.copy.Blocks[number].Seed, th.w.cfg.Sampling.Arena, s.Off, int64(s.Len))
	return sum, err == nil
}

// mismatch drops a block that differs between the slot and the engine. It drops a stored block too,
// unless the slot still has the sum of its save: then the copy or the engine's memory is at fault,
// and other engines may load the block.
func (th *thread) mismatch(t *task, f *flight, i int, engine, slot uint32) {
	status := Failed
	if th.kind == Load {
		if sum, ok := th.sumSlot(f, i); !ok || th.w.cfg.Integrity != Full || sum != f.slots[i].Sum {
			status = pool.Corrupt
		}
	}
	f.status[i] = status
	if report := th.w.cfg.Sampling.Mismatch; report != nil {
		number, at := f.number[i]%len(t.status), f.where[i]
		report(Mismatch{
			Job: t.job.ID, Kind: th.kind, Group: at.group, Hash: t.job.hash(number), Block: at.block,
			Engine: engine, Slot: slot, Status: status,
		})
	}
}

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
