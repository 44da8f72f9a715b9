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
	th.batches(t, way{th.beginLoad, th.landLoad})
}

// beginLoad pins the batch's blocks.
func (th *thread) beginLoad(t *task, f *flight, parts []part) pool.Status {
	th.enter(Reserving)
	f.copy.Dir = cudaipc.Scatter
	for i := range parts {
		b := th.batch(t, &parts[i])
		th.w.cfg.Slots.Acquire(&b)
		th.add(f, &parts[i], &b)
	}
	// The epoch is looked at while the blocks are pinned: what was pinned in the job's epoch or before it, and was
	// there, is of that epoch.
	if th.stale(t) {
		f.all(pool.Stale)
		th.release(t, f)
		t.rest(parts[0].first, pool.Stale)
		return pool.Stale
	}
	if last := &parts[len(parts)-1]; last.first+last.to-last.from == len(t.status) {
		f.copy.Serial = t.job.ID // whoever waits for the job's event waits for all of it: copies of one direction happen in their order
	}
	return pool.OK
}

// landLoad says which blocks arrived as they were stored. Those of a batch under way count, whatever became of the ones before.
func (th *thread) landLoad(t *task, f *flight, before pool.Status) pool.Status {
	for len(f.asked) > 0 {
		th.compare(t, f, th.sums(f), true)
	}
	th.release(t, f)
	return before
}

// stale says that the job's weights epoch is over.
func (th *thread) stale(t *task) bool {
	return th.w.spaces != nil && th.w.spaces.Epoch(th.w.cfg.Space) != t.job.Epoch
}

// verify compares what was copied with what was stored. There are no sums if they are not checked.
func verify(f *flight) {
	for i := range f.sums {
		if f.status[i] == pool.OK && f.sums[i] != f.slots[i].Sum {
			f.status[i] = pool.Corrupt
		}
	}
}

func (th *thread) release(t *task, f *flight) {
	th.enter(Committing)
	th.w.cfg.Slots.Release(f.slots, f.status)
	f.report(t)
}
