package transfer

import (
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer/pace"
)

// span is one shard of the blocks from to to-1 of one section that are in the current batch.
type span struct {
	section  *Section
	held     int // index of the shard
	from, to int
	first    int // index of its first block in task.shards
}

// cursor is the start of the next batch of a job.
type cursor struct {
	section, block int
	number         int // of the block in the job
}

// batchOps are the batches of one kind of job. A status other than OK that launch or finish returns
// is that of all blocks after the batch; finish takes the status of the batches before and returns
// its own.
type batchOps struct {
	more   func() bool
	launch func(lane *ticket) pool.Status
	finish func(*task, *flight, pool.Status) pool.Status
}

// batches does a job batch by batch, each with its own lane. While the oldest batch is in flight it
// starts further ones, up to Limits.Batches and while a lane is free, so that no copy engine waits
// for this thread. Batches finish in order. A cancelled job keeps the results of its finished
// batches.
func (th *thread) batches(t *task, ops batchOps) pool.Status {
	status := pool.OK
	for status == pool.OK && ops.more() {
		if status = th.awaitPace(t); status != pool.OK {
			break
		}
		lane, ok := th.nextLane(t)
		switch {
		case ok:
			status = ops.launch(lane)
		case len(th.begun) > 0:
			status = th.finishOldest(t, ops, pool.OK)
		default:
			status = Cancelled // cancelled while it waited for a lane
		}
	}
	for len(th.begun) > 0 {
		status = th.finishOldest(t, ops, status)
	}
	return status
}

// finishOldest finishes the oldest batch in flight. The next copies continue meanwhile.
func (th *thread) finishOldest(t *task, ops batchOps, before pool.Status) pool.Status {
	f := th.begun[0]
	status := ops.finish(t, f, before)
	th.begun = append(th.begun[:0], th.begun[1:]...)
	th.recycle(f)
	return status
}

// whole waits for the engine and then does a job in batches of whole blocks, whose slots begin
// takes.
func (th *thread) whole(
	t *task, begin func(*task, *flight, []span) pool.Status,
	finish func(*task, *flight, pool.Status) pool.Status,
) {
	var c cursor
	status := th.await(t)
	if status == pool.OK {
		status = th.batches(t, batchOps{
			more:   func() bool { return c.number < len(t.status) },
			launch: func(lane *ticket) pool.Status { return th.launch(t, &c, lane, begin) },
			finish: finish,
		})
	}
	if status != pool.OK {
		t.setFrom(c.number, status)
	}
}

// maxBatchRuns bounds the runs of one copy of several blocks, and so a thread's memory for any
// layout. A device takes cudaipc.MaxCopyRuns.
const maxBatchRuns = 1 << 17

// take returns the spans of the next batch: at least one block with all shards held, and else at
// most Limits.BatchBytes and maxBatchRuns.
func (th *thread) take(t *task, c *cursor) []span {
	th.spans = th.spans[:0]
	room, runs := th.w.cfg.Limits.BatchBytes, maxBatchRuns
	if th.urgency(t) != pace.Urgent {
		room = th.w.cfg.Pacer.Batch(room)
	}
	for c.section < len(t.job.Sections) {
		s := &t.job.Sections[c.section]
		left := len(s.Blocks) - c.block
		if left == 0 {
			c.section, c.block = c.section+1, 0
			continue
		}
		bytes, each := th.w.bytes[s.Group], th.w.runs[s.Group]
		n := min(left, int(room/bytes), runs/each)
		if n <= 0 && len(th.spans) > 0 { // negative: the first block was larger than a batch
			break
		}
		n = max(n, 1)
		for h := range th.w.held {
			th.spans = append(th.spans, span{s, h, c.block, c.block + n, t.index(h, c.number)})
		}
		c.block, c.number = c.block+n, c.number+n
		room -= int64(n) * bytes
		runs -= n * each
	}
	return th.spans
}

// batch returns the pool's batch of a span. Its status is a slice of task.shards.
func (th *thread) batch(t *task, p *span) pool.Batch {
	n := p.to - p.from
	if cap(th.slots) < n {
		th.slots = make([]pool.Slot, n)
	}
	parent := p.section.Parent
	if p.from > 0 {
		parent = p.section.Hashes.At(p.from - 1)
	}
	return pool.Batch{
		Space: th.w.cfg.Space, Group: p.section.Group, Shard: th.w.held[p.held].shard, Epoch: t.job.Epoch,
		Parent: parent,
		Hashes: p.section.Hashes.Slice(p.from, p.to),
		Status: t.shards[p.first : p.first+n], Slots: th.slots[:n],
		Refusable: th.w.cfg.Refusable && !th.w.awaited(),
	}
}

// nextLane returns a lane for the next batch if it can begin now. If no batch is in flight it waits
// for a lane, and returns false only if the job has ended.
func (th *thread) nextLane(t *task) (*ticket, bool) {
	if len(th.begun) == 0 {
		return th.lane(t)
	}
	if len(th.begun) == th.w.cfg.Limits.Batches {
		return nil, false
	}
	if th.ended(t) {
		return nil, false
	}
	if th.urgency(t) != pace.Urgent && !th.w.cfg.Pacer.May() {
		return nil, false
	}
	return th.w.cfg.Lanes.try(th.kind)
}

// lane waits for the right to copy. It gives the lane up if the job ends meanwhile.
func (th *thread) lane(t *task) (*ticket, bool) {
	th.enter(WaitingLane)
	lane := th.w.cfg.Lanes.enter(th.kind)
	if th.ended(t) || !th.wait(t, lane.granted, nil) {
		th.w.cfg.Lanes.leave(lane)
		return nil, false
	}
	return lane, true
}
