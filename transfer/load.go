package transfer

import (
	"github.com/kvagent/kvagent/pool"
)

func (th *thread) load(t *task) {
	if th.stale(t) {
		t.setFrom(0, pool.Stale)
		return
	}
	if t.job.Staged != nil {
		th.loadStaged(t)
		return
	}
	th.whole(t, th.beginLoad, th.finishLoad)
}

// beginLoad pins the batch's blocks.
func (th *thread) beginLoad(t *task, f *flight, spans []span) pool.Status {
	th.enter(Reserving)
	for i := range spans {
		b := th.batch(t, &spans[i])
		th.w.cfg.Slots.Acquire(&b)
		th.add(f, &spans[i], &b, false)
	}
	// The epoch is read while the blocks are pinned: blocks that were pinned before or in the job's
	// epoch belong to that epoch.
	if th.stale(t) {
		f.all(pool.Stale)
		th.release(t, f)
		t.setFrom(spans[0].first, pool.Stale)
		return pool.Stale
	}
	return pool.OK
}

// finishLoad reports which blocks arrived as they were stored. A batch in flight counts, whatever
// the status of those before.
func (th *thread) finishLoad(t *task, f *flight, before pool.Status) pool.Status {
	th.awaitCopy(t, f, before)
	for len(f.samples) > 0 {
		th.sums(f)
		th.compare(t, f, true)
	}
	th.release(t, f)
	return before
}

// stale reports whether the job's weights epoch has ended.
func (th *thread) stale(t *task) bool {
	return th.w.cfg.Slots.Epoch(th.w.cfg.Space) != t.job.Epoch
}

// verify compares the copied blocks' sums with the stored ones. Without checks there are no sums.
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
