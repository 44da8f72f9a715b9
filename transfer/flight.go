package transfer

import (
	"slices"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer/pace"
)

// flight is a batch from its begin until its blocks have been reported: its copy and its slots. It
// is reused for a later batch.
type flight struct {
	lane   *ticket
	pace   pace.Urgency
	copy   cudaipc.Copy
	ticket cudaipc.Ticket
	err    error // why the device did not take the copy

	// The blocks to copy, in the order of the copy.
	slots  []pool.Slot
	status []pool.Status
	number []int // index of the block in task.shards
	where  []place

	// Of a copy of a staged load: where the ranges' sums belong in it, and how many stages have
	// arrived when this copy and all before it have ended.
	at     []int
	landed int

	sums    []uint32         // set when the copy has ended
	checked []bool           // blocks that are or were in a sample
	samples []*sampleRequest // in flight
}

// launch begins the next batch of a job. A batch without blocks to copy ends at once.
func (th *thread) launch(
	t *task, c *cursor, lane *ticket, begin func(*task, *flight, []span) pool.Status,
) pool.Status {
	f := th.spare()
	f.lane = lane
	status := begin(t, f, th.take(t, c))
	if status != pool.OK || len(f.slots) == 0 {
		th.recycle(f)
		return status
	}
	th.begin(t, f, th.urgency(t), f.bytes())
	return pool.OK
}

// begin gives the device the copy of a flight.
func (th *thread) begin(t *task, f *flight, urgency pace.Urgency, bytes int64) {
	f.pace = urgency
	th.w.cfg.Pacer.Begin(f.pace, bytes)
	t.clock.begin()
	f.ticket, f.err = th.w.cfg.Peer.Copy(&f.copy)
	th.begun = append(th.begun, f)
}

// spare returns a flight for the next batch.
func (th *thread) spare() *flight {
	f := &flight{}
	if n := len(th.spares); n > 0 {
		f, th.spares = th.spares[n-1], th.spares[:n-1]
	}
	f.copy = cudaipc.Copy{
		Dir: cudaipc.Direction(th.kind), Sum: th.w.cfg.Integrity == Full,
		Runs: f.copy.Runs[:0], Blocks: f.copy.Blocks[:0],
	}
	f.slots, f.status, f.number = f.slots[:0], f.status[:0], f.number[:0]
	f.where, f.checked, f.sums = f.where[:0], f.checked[:0], nil
	f.at, f.landed = f.at[:0], 0
	return f
}

// recycle keeps a finished flight for reuse.
func (th *thread) recycle(f *flight) {
	th.leaveLane(f)
	th.spares = append(th.spares, f)
}

// add adds the blocks for which the pool gave slots, and unless they are of a staged load their
// runs to the copy. It reports whether these are all blocks.
func (th *thread) add(f *flight, p *span, b *pool.Batch, isStaged bool) (all bool) {
	held := &th.w.held[p.held]
	plan := &held.plans[p.section.Group]
	key := pool.Key{Space: th.w.cfg.Spec.Fingerprint, Group: p.section.Group, Shard: held.shard}
	all = true
	for i, status := range b.Status {
		if status != pool.OK {
			all = false
			continue
		}
		before := len(f.copy.Runs)
		if !isStaged {
			f.copy.Runs = plan.runs(f.copy.Runs, p.section.Blocks[p.from+i], b.Slots[i].Off)
		}
		key.Hash = pool.MakeHash(b.Hashes.At(i))
		f.copy.Blocks = append(f.copy.Blocks,
			cudaipc.Block{Runs: uint32(len(f.copy.Runs) - before), Seed: key.Seed(plan.bytes)})
		f.slots = append(f.slots, b.Slots[i])
		f.status = append(f.status, pool.OK)
		f.number = append(f.number, p.first+i)
		f.where = append(f.where, place{p.held, p.section.Group, p.section.Blocks[p.from+i]})
		f.checked = append(f.checked, false)
	}
	return all
}

func (th *thread) leaveLane(f *flight) {
	if f.lane != nil {
		th.w.cfg.Lanes.leave(f.lane)
		f.lane = nil
	}
}

// awaitCopy waits for the flight's copy to end. It marks the blocks that were not copied, and of a
// load those that differ from what was stored, keeps the sums of the others, and starts the check
// of a sample if the batches before were OK.
func (th *thread) awaitCopy(t *task, f *flight, before pool.Status) {
	bad := th.copied(t, f)
	for i := range bad {
		if bad[i] {
			f.status[i] = th.failureStatus(&f.slots[i])
		}
	}
	if th.kind == Load {
		verify(f)
	}
	if before == pool.OK && !th.ended(t) {
		th.check(f)
	}
}

// copied waits without a time limit for the flight's copy to end, and keeps its sums. It returns
// which elements of the copy did not arrive; nil: all have.
func (th *thread) copied(t *task, f *flight) (bad []bool) {
	th.enter(Copying)
	d, err := th.outcome(f.ticket, f.err)
	t.clock.end(d.SumTime)
	th.w.cfg.Pacer.Ended(f.pace)
	th.leaveLane(f)
	if n := len(f.copy.Blocks); err != nil || f.copy.Sum && len(d.Sums) != n { // what has no sum was not copied
		return slices.Repeat([]bool{true}, n)
	}
	f.sums = d.Sums
	return d.Bad
}

// failureStatus returns the status of a block that was not copied. If the pool cannot read its
// slot, the slot is the reason: a load drops the entry then, so that it is not promised again.
func (th *thread) failureStatus(slot *pool.Slot) pool.Status {
	if !th.w.cfg.Slots.Probe(*slot) && th.kind == Load {
		return pool.Corrupt
	}
	return Failed
}

// outcome waits for the end of a copy, unless err means that the device did not accept it.
func (th *thread) outcome(wait cudaipc.Ticket, err error) (cudaipc.Done, error) {
	if err != nil {
		return cudaipc.Done{}, err
	}
	for {
		d, ok, err := wait(doneWait)
		if ok || err != nil {
			return d, err
		}
	}
}

// bytes returns the bytes of the flight's blocks.
func (f *flight) bytes() (n int64) {
	for i := range f.slots {
		n += int64(f.slots[i].Len)
	}
	return n
}

// all sets the status of every block of the flight.
func (f *flight) all(s pool.Status) {
	for i := range f.status {
		f.status[i] = s
	}
}

// report adds the flight's statuses and bytes to the job.
func (f *flight) report(t *task) {
	for i, status := range f.status {
		t.shards[f.number[i]] = status
		if status == pool.OK {
			t.bytes += int64(f.slots[i].Len)
		}
	}
}
