package tier

import (
	"context"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// takeFetchesLocked takes a batch of promises off the queue.
func (p *Pool) takeFetchesLocked(l *level) (batch []*promise) {
	bytes, items := int64(0), 0
	for l.fetches.Len() > 0 {
		pr := l.fetches.Front().Value.(*promise)
		if len(batch) > 0 && (bytes+pr.group.staged > l.BatchBytes || items+len(pr.group.at) > l.BatchItems) {
			break
		}
		pr.dequeue()
		pr.state = running
		batch = append(batch, pr)
		bytes, items = bytes+pr.group.staged, items+len(pr.group.at)
	}
	return batch
}

// incoming is one entry of a batch being fetched.
type incoming struct {
	*promise
	loan  transit.Loan
	items []pool.Item // by shard
}

// fetch brings a batch of promises to memory. It queues those again for which staging has no room.
func (l *level) fetch(ctx context.Context, batch []*promise) {
	var on []incoming
	var items []pool.Item
	late := l.p.now().Add(-hintAge)
	for i, pr := range batch {
		l.p.callTestHook()
		if !l.p.stillWanted(pr, late) {
			l.p.end(pr, nil)
			continue
		}
		f := incoming{promise: pr}
		if len(on) == 0 {
			f.loan = l.p.o.Staging.Wait(pr.group.staged)
		} else if f.loan = l.p.o.Staging.Take(pr.group.staged, false); f.loan.Size == 0 {
			l.p.callTestHook()
			l.p.requeue(l, batch[i:])
			break
		}
		if f.loan.Size == 0 {
			l.p.end(pr, l)
			continue
		}
		if !l.p.stillWanted(pr, late) { // it may have ended during the wait for staging
			l.p.returnLoans(f.loan)
			l.p.end(pr, nil)
			continue
		}
		on = append(on, f)
	}
	for i := range on {
		items = append(items, on[i].request()...)
	}
	if len(items) == 0 {
		return
	}
	l.p.callTestHook()
	using := l.get(ctx, items)
	l.p.callTestHook()
	var remove []pool.Key
	for i := range on {
		f := &on[i]
		f.items, items = items[:len(f.items)], items[len(f.items):]
		if l.arrive(f) {
			for i := range f.items {
				remove = append(remove, f.items[i].Key)
			}
		}
		l.p.returnAfter(ctx, using, f.loan)
	}
	l.queueRemovals(remove)
}

// request returns the items to get for an entry: a value with its header for each shard.
func (f *incoming) request() []pool.Item {
	for shard, at := range f.group.at {
		n := int64(f.sp.spec.Groups[f.key.group].ShardBytes[shard]) + transit.HeaderBytes
		clear(f.loan.Bytes[at : at+transit.HeaderBytes]) // a header found there afterwards was written by this fetch
		f.items = append(f.items, pool.Item{
			Key: f.era.key(&f.key, uint8(shard)), Data: f.loan.Bytes[at : at+n : at+n], Status: pool.Missing,
		})
	}
	return f.items
}

// get calls the store with FetchWithin as its time limit. Items that the store does not decide keep
// Busy. If using is not nil, the store may write to the items' data until it is closed.
func (l *level) get(ctx context.Context, items []pool.Item) (using <-chan struct{}) {
	for i := range items {
		items[i].Status = pool.Busy
	}
	within, stop := context.WithTimeout(ctx, l.FetchWithin)
	defer stop()
	start := time.Now()
	err := l.Store.Get(within, items)
	l.countResult(ctx, moves, err)
	l.count.add(func(t *pool.TierStatus) { smooth(&t.FetchSeconds, start) })
	return stillUsing(err)
}

// arrive verifies the values of an entry and installs it in memory if it is complete. It reports
// whether the store is to drop the shards, damaged ones too, so that the entry is written again.
func (l *level) arrive(f *incoming) (remove bool) {
	sums, errs := make([]uint32, len(f.items)), make([]error, len(f.items))
	ok, absent, bad := 0, 0, false
	for i := range f.items {
		it := &f.items[i]
		if it.Status == pool.OK {
			own := f.sp.ownKey(&f.key, uint8(i))
			if sums[i], errs[i] = transit.Verify(&it.Key, &own, it.Data); errs[i] != nil {
				it.Status = pool.Corrupt
			}
		} else if it.Status == pool.Corrupt {
			errs[i] = transit.DamageError(&it.Key, it.Data)
		}
		switch it.Status {
		case pool.OK:
			ok++
			l.count.add(func(t *pool.TierStatus) { t.BytesIn += uint64(len(it.Data) - transit.HeaderBytes) })
		case pool.Corrupt:
			bad = true
			l.logLimited("dropped a damaged value", errs[i])
			l.count.add(func(t *pool.TierStatus) { t.Corrupt++ })
		case pool.Missing:
			absent++
		}
	}
	if ok == len(f.items) {
		l.count.add(func(t *pool.TierStatus) { t.Hits++ })
		if held := l.p.install(f, sums); held != nil {
			l.p.settleInstalled(f.promise, l, held)
			return false
		}
		l.p.end(f.promise, nil) // memory has no room or the epoch is over: another tier would not help
		return false
	}
	l.count.add(func(t *pool.TierStatus) { t.Misses++ })
	l.notFound(f)
	l.p.end(f.promise, l)
	return bad || absent > 0 && ok > 0
}

// notFound records that the store did not return an entry completely, so that it is not asked for
// at once again.
func (l *level) notFound(f *incoming) {
	digest := f.era.digest(f.key.group, f.key.hash.Bytes[:f.key.hash.Len])
	l.written.put(digest, false, l.p.now()) // unknown
	if !l.Local {
		l.exists.put(digest, false, l.p.now().Add(l.AbsentFor))
	}
}

// stillWanted reports whether a promise is still open, and pinned or a hint younger than hintAge.
func (p *Pool) stillWanted(pr *promise, late time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return pr.open() && (pr.pins > 0 || pr.hint && pr.since.After(late))
}

// requeue queues promises for which staging had no room. It ends those that no tier is left for.
func (p *Pool) requeue(l *level, rest []*promise) {
	var calls []func()
	p.mu.Lock()
	for _, pr := range rest {
		if pr.open() && (p.mu.closed || !p.sendLocked(pr)) {
			calls = p.settleLocked(pr, failed, calls)
		}
	}
	l.wake.Signal()
	p.mu.Unlock()
	run(calls)
}

// end ends a promise that was not fetched, or sends it on to the tier after l, if l failed.
func (p *Pool) end(pr *promise, l *level) {
	p.mu.Lock()
	var calls []func()
	if l != nil {
		calls = p.tryNextLocked(pr, l, nil)
	} else {
		calls = p.settleLocked(pr, failed, nil)
	}
	p.mu.Unlock()
	run(calls)
}

// install copies verified shards into memory and pins the entry there. It returns nil if the entry
// is no longer wanted, its epoch is over, memory has no room, or the entry is being written
// already.
func (p *Pool) install(f *incoming, sums []uint32) (held []pool.Slot) {
	p.mu.Lock()
	wanted := f.open() && f.wanted()
	p.mu.Unlock()
	if !wanted || f.sp.now.Load() != f.era {
		return nil
	}
	b := pool.Batch{
		Space:  f.key.space,
		Group:  f.key.group,
		Epoch:  f.era.epoch,
		Parent: f.parent.Bytes[:f.parent.Len],
		Hashes: pool.Chain(f.key.hash.Bytes[:f.key.hash.Len], int(f.key.hash.Len)),
		Status: make([]pool.Status, 1),
		Slots:  make([]pool.Slot, 1),
	}
	if !p.fill(f, sums, &b) {
		return nil
	}
	b.Shard = 0
	p.callTestHook()
	p.Memory.Acquire(&b)
	if b.Status[0] != pool.OK {
		return nil
	}
	return b.Slots
}

// fill reserves, writes and commits all shards of an entry, or none.
func (p *Pool) fill(f *incoming, sums []uint32, b *pool.Batch) bool {
	slots, status := make([]pool.Slot, 0, len(sums)), make([]pool.Status, 0, len(sums))
	whole := true
	for shard := range sums {
		b.Shard = uint8(shard)
		p.Memory.Reserve(b)
		if b.Status[0] == pool.Exists {
			continue // it was saved meanwhile
		}
		if b.Status[0] != pool.OK {
			whole = false
			break
		}
		s := b.Slots[0]
		whole = p.reach(s, func(b []byte) { copy(b, f.items[shard].Data[transit.HeaderBytes:]) })
		s.Sum = sums[shard]
		slots, status = append(slots, s), append(status, pool.OK)
		if !whole {
			break
		}
	}
	for i := range status {
		if !whole {
			status[i] = pool.Busy
		}
	}
	p.Memory.Commit(slots, f.era.epoch, status)
	for _, s := range status {
		whole = whole && s == pool.OK
	}
	return whole
}

// settleInstalled ends a promise whose entry was installed, and hands the pin in memory to its
// refs. It offers the entry to the nearer tiers that write on save.
func (p *Pool) settleInstalled(pr *promise, from *level, held []pool.Slot) {
	p.mu.Lock()
	if pr.open() && pr.pins > 0 {
		pr.held, held = held, nil
	}
	calls := p.settleLocked(pr, installed, nil)
	if pr.era == pr.sp.now.Load() {
		for _, l := range p.levels[:from.number] {
			if l.Write == OnSave {
				l.queueLocked(pr.origin)
			}
		}
	}
	p.mu.Unlock()
	p.release(held)
	run(calls)
}
