package transfer

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// part is the blocks from to to-1 of one section, as far as they are in the batch at hand.
type part struct {
	section  *Section
	from, to int
	first    int // number of its first block in the job
}

// flat is the blocks of a batch that are copied, one behind the other: what the device and Commit or Release see.
type flat struct {
	slots  []pool.Slot
	status []pool.Status
	number []int // of the block in the job
}

// cursor is where the next batch of a job begins.
type cursor struct {
	section, block int
	number         int // of the block in the job
}

// batches waits for the engine and then does a job batch by batch, each with a lane of its own. A job that is
// cancelled keeps what its batches so far have done.
func (th *thread) batches(t *task, do func(*task, []part) pool.Status) {
	if s := th.await(t); s != pool.OK {
		t.rest(0, s)
		return
	}
	for c := (cursor{}); c.number < len(t.status); {
		from := c.number
		parts := th.take(t, &c)
		lane, ok := th.lane(t)
		status := Cancelled
		if ok {
			from = c.number
			status = do(t, parts)
		}
		th.w.cfg.Lanes.leave(lane)
		if status != pool.OK {
			t.rest(from, status)
			return
		}
	}
}

// maxBatchRuns is the most runs of one copy, at least those of one block: what a thread keeps memory for, whatever pieces an engine's layout has. A
// device takes cudaipc.MaxCopyRuns.
const maxBatchRuns = 1 << 17

// take gives the parts of the next batch: blocks of together at most Limits.BatchBytes and maxBatchRuns, but at least one.
func (th *thread) take(t *task, c *cursor) []part {
	th.parts = th.parts[:0]
	room, runs := th.w.cfg.Limits.BatchBytes, maxBatchRuns
	for c.section < len(t.job.Sections) {
		s := &t.job.Sections[c.section]
		left := len(s.Blocks) - c.block
		if left == 0 {
			c.section, c.block = c.section+1, 0
			continue
		}
		plan := &th.w.plans[s.Group]
		n := min(left, int(room/int64(plan.bytes)), runs/len(plan.segments))
		if n <= 0 && len(th.parts) > 0 { // below zero: the first block was larger than a batch
			break
		}
		n = max(n, 1)
		th.parts = append(th.parts, part{s, c.block, c.block + n, c.number})
		c.block, c.number = c.block+n, c.number+n
		room -= int64(n) * int64(plan.bytes)
		runs -= n * len(plan.segments)
	}
	return th.parts
}

// batch is the part as the pool is asked for it. Its status is the job's.
func (th *thread) batch(t *task, p *part) pool.Batch {
	n := p.to - p.from
	if cap(th.slots) < n {
		th.slots = make([]pool.Slot, n)
	}
	parent := p.section.Parent
	if p.from > 0 {
		parent = p.section.Hashes.At(p.from - 1)
	}
	return pool.Batch{
		Space: th.w.cfg.Space, Group: p.section.Group, Shard: th.w.cfg.Shard, Epoch: t.job.Epoch, Parent: parent,
		Hashes: p.section.Hashes.Slice(p.from, p.to),
		Status: t.status[p.first : p.first+n], Slots: th.slots[:n],
	}
}

func (th *thread) clear() {
	th.copy = cudaipc.Copy{
		Peer: th.w.cfg.Peer, Sum: th.w.cfg.Integrity == Full,
		Runs: th.copy.Runs[:0], Blocks: th.copy.Blocks[:0],
	}
	th.flat.slots, th.flat.status, th.flat.number = th.flat.slots[:0], th.flat.status[:0], th.flat.number[:0]
}

// add puts the blocks that the pool gave slots for into the copy.
func (th *thread) add(p *part, b *pool.Batch) {
	plan := &th.w.plans[p.section.Group]
	key := pool.Key{Space: th.w.cfg.Spec.Fingerprint, Group: p.section.Group, Shard: th.w.cfg.Shard}
	for i, status := range b.Status {
		if status != pool.OK {
			continue
		}
		before := len(th.copy.Runs)
		th.copy.Runs = plan.runs(th.copy.Runs, p.section.Blocks[p.from+i], b.Slots[i].Off)
		key.Hash = pool.MakeHash(b.Hashes.At(i))
		th.copy.Blocks = append(th.copy.Blocks, cudaipc.Block{Runs: uint32(len(th.copy.Runs) - before), Seed: key.Seed(plan.bytes)})
		th.flat.slots = append(th.flat.slots, b.Slots[i])
		th.flat.status = append(th.flat.status, pool.OK)
		th.flat.number = append(th.flat.number, p.first+i)
	}
}

// move copies what is in th.copy and returns when nothing of it is under way any more, however long that takes.
// It marks the blocks that did not arrive, and gives the sums of those that did.
func (th *thread) move() []uint32 {
	th.enter(Copying)
	d, err := th.end()
	short := th.copy.Sum && len(d.Sums) != len(th.copy.Blocks) // a block without its sum has not arrived
	for i := range th.flat.status {
		if err != nil || short || (d.Bad != nil && d.Bad[i]) {
			th.flat.status[i] = Failed
		}
	}
	if short {
		return nil
	}
	return d.Sums
}

func (th *thread) end() (cudaipc.Done, error) {
	device := th.w.cfg.Device
	ticket, err := device.Copy(&th.copy)
	if err != nil {
		return cudaipc.Done{}, err
	}
	for {
		d, ok, err := device.Done(ticket, doneWait)
		if ok || err != nil {
			return d, err
		}
		th.sweep()
	}
}

// report brings the batch's statuses and bytes into the job.
func (th *thread) report(t *task) {
	for i, status := range th.flat.status {
		t.status[th.flat.number[i]] = status
		if status == pool.OK {
			t.bytes += int64(th.flat.slots[i].Len)
		}
	}
}

// lane waits for the right to copy. The lane is to be left in any case.
func (th *thread) lane(t *task) (*ticket, bool) {
	th.enter(WaitingLane)
	lane := th.w.cfg.Lanes.enter(th.kind)
	if th.ended(t) {
		return lane, false
	}
	return lane, th.wait(t, lane.granted, nil)
}
