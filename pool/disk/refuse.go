package disk

import "github.com/kvagent/kvagent/pool"

// refuse says why a record is not written, if it is not. With the lock held.
func (d *dir) refuse(r *record) (pool.Status, bool) {
	switch {
	case r.kind == tombstone:
		return d.refuseTombstone(r)
	case r.from.segment != 0:
		return d.refuseAgain(r)
	}
	if _, ok := d.s.index.get(r.tag); ok {
		return pool.Exists, true
	}
	if d.pending[r.tag] != nil {
		return pool.InProgress, true
	}
	if d.state != StateOK {
		d.s.count.putsLost.Add(1)
		return pool.Busy, true
	}
	if !d.budget.has() {
		d.s.count.overBudget.Add(1)
		return pool.Busy, true
	}
	return 0, false
}

// refuseAgain is for a block that its segment's eviction writes again. It never waits for a segment: making one is what evicts.
func (d *dir) refuseAgain(r *record) (pool.Status, bool) {
	if p, ok := d.s.index.get(r.tag); !ok || !p.same(r.from) {
		return pool.Missing, true
	}
	noSegment := d.writing == nil && d.next == nil
	if d.state != StateOK || noSegment || !d.budget.has() {
		return pool.Busy, true
	}
	if d.next == nil && !d.writing.room(int64(d.curBytes()), r.size(), d.s.o.SegmentBytes) {
		return pool.Busy, true
	}
	return 0, false
}

func (d *dir) curBytes() int {
	if d.cur == nil {
		return 0
	}
	return d.cur.n
}

func (d *dir) refuseTombstone(r *record) (pool.Status, bool) {
	if d.state != StateOK {
		r.had = d.forget(r.tag)
		d.owe(r.key)
		return pool.Busy, true
	}
	if _, stored := d.s.index.get(r.tag); stored || d.pending[r.tag] != nil || d.lost.Load() {
		return 0, false
	}
	return pool.OK, true // neither here nor on the disk
}

// owe remembers a delete for when the directory is back. With the lock held.
func (d *dir) owe(k pool.Key) {
	d.s.count.deletesOwed.Add(1)
	if len(d.owed) >= maxOwed {
		d.owed, d.owedAll = nil, true
	}
	if !d.owedAll {
		d.owed = append(d.owed, k)
	}
}
