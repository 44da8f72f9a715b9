package transfer

import (
	"slices"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
)

// save executes a save. It holds no slots while it waits for the engine.
func (th *thread) save(t *task) {
	if th.stale(t) {
		t.setFrom(0, pool.Stale)
		return
	}
	th.whole(t, th.beginSave, th.finishSave)
}

// beginSave reserves slots for the batch, of each span up to the first block without room.
func (th *thread) beginSave(t *task, f *flight, spans []span) pool.Status {
	th.enter(Reserving)
	for i, p := range spans {
		end := p.from + t.room(&p, &spans[i-p.held])
		t.set(p.first+end-p.from, p.to-end, pool.Busy)
		if p.to = end; p.from == end {
			continue
		}
		b := th.batch(t, &p)
		if th.w.cfg.Owner != nil {
			b.Owner = th.w.cfg.Owner()
		}
		th.w.cfg.Slots.Reserve(&b)
		th.add(f, &p, &b, false)
	}
	return pool.OK
}

// finishSave commits the copied blocks if the engine still wants them.
func (th *thread) finishSave(t *task, f *flight, before pool.Status) pool.Status {
	th.awaitCopy(t, f, before)
	for i := range f.sums {
		f.slots[i].Sum = f.sums[i]
	}
	verdict := before
	for more := true; more; more = len(f.samples) > 0 {
		th.sums(f)
		if verdict == pool.OK {
			verdict = th.confirm(t)
		}
		th.compare(t, f, verdict == pool.OK)
	}
	th.commit(t, f, verdict)
	return verdict
}

// room returns the number of a span's blocks to look for room for. Only the first shard's span
// looks beyond a block without room: the others would repeat the search of the whole pool, and
// could store blocks that lack the first shard.
func (t *task) room(p, first *span) int {
	n := p.to - p.from
	// Blocks after one without room could not be found, and room for them would be made by evicting
	// the chain's own beginning.
	if p.from > 0 && t.shards[p.first-1] == pool.Busy {
		return 0
	}
	if p.held > 0 {
		if busy := slices.Index(t.shards[first.first:first.first+n], pool.Busy); busy >= 0 {
			return busy
		}
	}
	return n
}

// confirm checks, after the copy and its check and before the commit, that the engine still wants
// the save: a revoked block may have been overwritten while it was read.
func (th *thread) confirm(t *task) pool.Status {
	_, status := th.pollWanted(t, cudaipc.None)
	return status
}

// commit makes the blocks of a batch visible, or drops them: all of them unless verdict is OK, else
// those that were not copied.
func (th *thread) commit(t *task, f *flight, verdict pool.Status) {
	th.enter(Committing)
	if verdict != pool.OK {
		f.all(verdict)
	}
	th.w.cfg.Slots.Commit(f.slots, t.job.Epoch, f.status)
	f.report(t)
}
