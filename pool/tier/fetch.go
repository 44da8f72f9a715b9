package tier

import (
	"context"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// takeFetchesLocked takes a batch of promises that are still wanted, held ones first.
func (p *Pool) takeFetchesLocked(l *lane) (batch []*promise) {
	bytes, items := int64(0), 0
	for _, q := range []*line{&l.fetches, &l.hints} {
		for q.head != nil {
			pr := q.head
			if len(batch) > 0 && (bytes+pr.group.staged > l.BatchBytes || items+len(pr.group.at) > l.BatchItems) {
				return batch
			}
			pr.leave()
			pr.state = running
			batch = append(batch, pr)
			bytes, items = bytes+pr.group.staged, items+len(pr.group.at)
		}
		if len(batch) > 0 {
			return batch
		}
	}
	return nil
}

// fetched is one entry of a batch on its way.
type fetched struct {
	*promise
	loan  transit.Loan
	items []pool.Item // by shard
}

// fetch brings a batch of promises to memory, as far as there is staging: what finds none waits in the queue.
func (l *lane) fetch(ctx context.Context, batch []*promise) {
	var on []fetched
	var items []pool.Item
	late := l.p.now().Add(-hintAge)
	for i, pr := range batch {
		l.p.step()
		if !l.p.stillWanted(pr, late) {
			l.p.end(pr, nil)
			continue
		}
		f := fetched{promise: pr}
		if len(on) == 0 {
			f.loan = l.p.o.Staging.Wait(pr.group.staged)
		} else if f.loan = l.p.o.Staging.Take(pr.group.staged, false); f.loan.Size == 0 {
			l.p.step()
			l.p.later(l, batch[i:])
			break
		}
		if f.loan.Size == 0 {
			l.p.end(pr, l)
			continue
		}
		if !l.p.stillWanted(pr, late) { // it may have ended while staging was waited for
			l.p.giveNow(f.loan)
			l.p.end(pr, nil)
			continue
		}
		on = append(on, f)
	}
	for i := range on {
		items = append(items, on[i].ask()...)
	}
	if len(items) == 0 {
		return
	}
	l.p.step()
	using := l.get(ctx, items)
	l.p.step()
	for i := range on {
		f := &on[i]
		f.items, items = items[:len(f.items)], items[len(f.items):]
		l.arrive(f)
		l.p.giveAfter(ctx, using, f.loan)
	}
}

// ask is the items of an entry: a value for each shard, header in front.
func (f *fetched) ask() []pool.Item {
	for shard, at := range f.group.at {
		n := int64(f.sp.spec.Groups[f.key.group].ShardBytes[shard]) + transit.HeaderBytes
		clear(f.loan.Bytes[at : at+transit.HeaderBytes]) // so that what is there in the end is of this fetch
		f.items = append(f.items, pool.Item{
			Key: f.life.key(&f.key, uint8(shard)), Data: f.loan.Bytes[at : at+n : at+n], Status: pool.Missing,
		})
	}
	return f.items
}

// get asks the store, within its time. Items it does not decide keep Busy. What it gives is not closed as long as the items' data is in use; nil: it is not.
func (l *lane) get(ctx context.Context, items []pool.Item) (using <-chan struct{}) {
	for i := range items {
		items[i].Status = pool.Busy
	}
	within, stop := context.WithTimeout(ctx, l.FetchWithin)
	defer stop()
	start := time.Now()
	l.pace.fetching(l.p.now())
	err := l.Store.Get(within, items)
	l.result(ctx, err)
	bytes := int64(0)
	for i := range items {
		if items[i].Status == pool.OK {
			bytes += int64(len(items[i].Data))
		}
	}
	l.pace.fetched(bytes, time.Since(start), l.p.now())
	return stillUsing(err)
}

// arrive checks what came of an entry, and takes it to memory if it is whole.
func (l *lane) arrive(f *fetched) {
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
			errs[i] = transit.Blame(&it.Key, it.Data)
		}
		switch it.Status {
		case pool.OK:
			ok++
			l.count.bytesIn.Add(uint64(len(it.Data) - transit.HeaderBytes))
		case pool.Corrupt:
			bad = true
			l.say("a value is damaged: it is dropped", errs[i])
			l.count.corrupt.Add(1)
		case pool.Missing:
			absent++
		}
	}
	if ok == len(f.items) {
		l.count.hits.Add(1)
		if held := l.p.land(f, sums); held != nil {
			l.p.landedAt(f.promise, l, held)
			return
		}
		l.p.end(f.promise, nil) // memory has no room, or the epoch is over: another tier's bytes would not help
		return
	}
	l.count.misses.Add(1)
	if bad || absent > 0 {
		l.absent(f, bad || ok > 0)
	}
	l.p.end(f.promise, l)
}

// absent notes that the store has not got an entry whole. What is damaged, or the rest of what lost a shard, is deleted, so that it is written again.
func (l *lane) absent(f *fetched, remove bool) {
	print := f.life.print(f.key.group, f.key.hash.Bytes[:f.key.hash.Len])
	l.written.forget(print)
	if !l.Local {
		l.known.put(print, false, l.p.now().Add(l.AbsentFor))
	}
	if !remove {
		return
	}
	keys := make([]pool.Key, len(f.items))
	for i := range f.items {
		keys[i] = f.items[i].Key
	}
	l.queueDelete(keys)
}

// stillWanted is false for what was given up or ended while it waited, and for hints nobody has
// come for.
func (p *Pool) stillWanted(pr *promise, late time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return pr.open() && (pr.pins > 0 || pr.hint && pr.since.After(late))
}

// later queues promises again for which there was no staging. Those that no tier is asked for any
// more end here: nobody else would find them.
func (p *Pool) later(l *lane, rest []*promise) {
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

// end ends a promise that did not come; l is the tier that failed it, nil if no other one would do better.
func (p *Pool) end(pr *promise, l *lane) {
	p.mu.Lock()
	var calls []func()
	if l != nil {
		calls = p.elsewhereLocked(pr, l, nil)
	} else {
		calls = p.settleLocked(pr, failed, nil)
	}
	p.mu.Unlock()
	run(calls)
}
