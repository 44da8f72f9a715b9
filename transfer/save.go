package transfer

import (
	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// save does a save. Nothing of the pool is held while it waits for the engine.
func (th *thread) save(t *task) {
	if th.stale(t) {
		t.rest(0, pool.Stale)
		return
	}
	if th.known(t) {
		return
	}
	th.batches(t, way{th.beginSave, th.landSave})
}

// known says that nothing of the job is to be copied: the pool has every block, or someone else is storing it. The engine
// is told without waiting.
func (th *thread) known(t *task) bool {
	number := 0
	for i := range t.job.Sections {
		s := &t.job.Sections[i]
		b := th.batch(t, &part{section: s, to: s.Hashes.N, first: number})
		th.w.cfg.Slots.Peek(&b)
		for _, status := range b.Status {
			if status != pool.Exists && status != pool.InProgress {
				return false
			}
		}
		number += s.Hashes.N
	}
	return number > 0
}

// beginSave asks the pool for room for the batch.
func (th *thread) beginSave(t *task, f *flight, parts []part) pool.Status {
	th.enter(Reserving)
	f.copy.Dir = cudaipc.Gather
	for i := range parts {
		b := th.batch(t, &parts[i])
		if t.behindBusy(&parts[i]) {
			t.set(parts[i].first, b.Hashes.N, pool.Busy)
			continue
		}
		th.w.cfg.Slots.Reserve(&b)
		th.add(f, &parts[i], &b)
	}
	return pool.OK
}

// landSave commits what arrived, if the engine still wants it.
func (th *thread) landSave(t *task, f *flight, before pool.Status) pool.Status {
	for i := range f.sums {
		f.slots[i].Sum = f.sums[i]
	}
	verdict := before
	for more := true; more; more = len(f.asked) > 0 {
		list := th.sums(f)
		if verdict == pool.OK {
			verdict = th.verdict(t)
		}
		th.compare(t, f, list, verdict == pool.OK)
	}
	th.commit(t, f, verdict)
	return verdict
}

// behindBusy says that the block before the part found no room: nobody could reach what lies behind it, and room for
// that would be made by evicting the chain's own beginning.
func (t *task) behindBusy(p *part) bool {
	return p.from > 0 && t.status[p.first-1] == pool.Busy
}

// verdict asks, after the copy and its check and before the commit, whether the engine still wants
// it: a revoked block may have been overwritten while it was read.
func (th *thread) verdict(t *task) pool.Status {
	_, status := th.look(t, cudaipc.None)
	return status
}

// commit makes the blocks of a batch visible, or gives them up: all of them unless verdict is OK, else those
// that did not arrive.
func (th *thread) commit(t *task, f *flight, verdict pool.Status) {
	th.enter(Committing)
	if verdict != pool.OK {
		f.all(verdict)
	}
	th.w.cfg.Slots.Commit(f.slots, t.job.Epoch, f.status)
	f.report(t)
}
