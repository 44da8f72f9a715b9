package transfer

import "github.com/kvagent/kvagent/pool"

// part is the blocks from to to-1 of one section, as far as they are in the batch at hand.
type part struct {
	section  *Section
	from, to int
	first    int // number of its first block in the job
}

// cursor is where the next batch of a job begins.
type cursor struct {
	section, block int
	number         int // of the block in the job
}

// way is how the batches of one kind of job begin and end. Unless begin answers OK, its answer is the status of all blocks behind the batch.
// land is given the status of the batches before, and gives its own: once one is not OK, those behind it are given up.
type way struct {
	begin func(*task, *flight, []part) pool.Status
	land  func(*task, *flight, pool.Status) pool.Status
}

// batches waits for the engine and then does a job batch by batch, each with a lane of its own. It gives the device the next ones, as
// far as Limits.Batches goes and a lane is free, while the oldest is under way, so that no copy engine waits for this thread; they
// end in their order. A job that is cancelled keeps what its batches so far have done.
func (th *thread) batches(t *task, w way) {
	if s := th.await(t); s != pool.OK {
		t.rest(0, s)
		return
	}
	var c cursor
	status := pool.OK
	for status == pool.OK && c.number < len(t.status) {
		lane, ok := th.another(t)
		switch {
		case ok:
			status = th.launch(t, &c, lane, w)
		case th.flying() > 0:
			status = th.land(t, w, pool.OK)
		default:
			status = Cancelled // while it waited for a lane
		}
	}
	for th.flying() > 0 {
		status = th.land(t, w, status)
	}
	if status != pool.OK {
		t.rest(c.number, status)
	}
}

// maxBatches is the most batches of a job under way: a thread keeps memory for each.
const maxBatches = 64

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

// flying is how many batches have begun and not ended.
func (th *thread) flying() int { return len(th.begun) + len(th.checking) }

// another gives the lane of a batch that can begin now. With none under way it waits for one; false says that the job has ended.
func (th *thread) another(t *task) (*ticket, bool) {
	if th.flying() == 0 {
		return th.lane(t)
	}
	if len(th.begun) == th.w.cfg.Limits.Batches {
		return nil, false
	}
	if th.ended(t) {
		return nil, false
	}
	return th.w.cfg.Lanes.try(th.kind)
}

// lane waits for the right to copy. It is left if the job ends meanwhile.
func (th *thread) lane(t *task) (*ticket, bool) {
	th.enter(WaitingLane)
	lane := th.w.cfg.Lanes.enter(th.kind)
	if th.ended(t) || !th.wait(t, lane.granted, nil) {
		th.w.cfg.Lanes.leave(lane)
		return nil, false
	}
	return lane, true
}
