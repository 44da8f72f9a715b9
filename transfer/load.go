package transfer

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// load does a load.
func (th *thread) load(t *task) {
	if th.stale(t) {
		t.rest(0, pool.Stale)
		return
	}
	th.batches(t, th.loadBatch)
}

// loadBatch decides each block of the batch. Unless it gives OK, its answer is the status of all blocks behind it.
func (th *thread) loadBatch(t *task, parts []part) pool.Status {
	th.enter(Reserving)
	th.clear()
	for i := range parts {
		b := th.batch(t, &parts[i])
		th.w.cfg.Slots.Acquire(&b)
		th.add(&parts[i], &b)
	}
	// The epoch is looked at while the blocks are pinned: what was pinned in the job's epoch or before it, and was
	// there, is of that epoch.
	if th.stale(t) {
		th.release(t, pool.Stale)
		t.rest(parts[0].first, pool.Stale)
		return pool.Stale
	}
	if len(th.flat.slots) > 0 {
		th.copy.Dir = cudaipc.Scatter
		if last := &parts[len(parts)-1]; last.first+last.to-last.from == len(t.status) {
			th.copy.Serial = t.job.ID // whoever waits for the job's event waits for all of it: the batches before have ended
		}
		th.verify(th.move())
		th.release(t, pool.OK)
	}
	return pool.OK
}

// stale says that the job's weights epoch is over.
func (th *thread) stale(t *task) bool {
	return th.w.spaces != nil && th.w.spaces.Epoch(th.w.cfg.Space) != t.job.Epoch
}

// verify compares what was copied with what was stored. sums is empty if they are not checked.
func (th *thread) verify(sums []uint32) {
	for i := range sums {
		if th.flat.status[i] == pool.OK && sums[i] != th.flat.slots[i].Sum {
			th.flat.status[i] = pool.Corrupt
		}
	}
}

func (th *thread) release(t *task, all pool.Status) {
	th.enter(Committing)
	if all != pool.OK {
		for i := range th.flat.status {
			th.flat.status[i] = all
		}
	}
	th.w.cfg.Slots.Release(th.flat.slots, th.flat.status)
	th.report(t)
}
