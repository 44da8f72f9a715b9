package tier

import (
	"context"
	"errors"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

func (o *origin) print() uint64 {
	return o.life.print(o.key.group, o.key.hash.Bytes[:o.key.hash.Len])
}

// writtenFor is how long an entry that was written is not offered again. A tier may forget it meanwhile.
const writtenFor = 10 * time.Minute

// write stores a batch of entries: those the store has are left out, the others are copied out of memory, if they were not before, each pinned no longer than that takes.
func (l *lane) write(ctx context.Context, batch []putItem) {
	var on []leaving
	var taken []transit.Loan
	var using <-chan struct{}
	for _, it := range l.lacking(ctx, batch) {
		if it.copied != nil && it.sp.now.Load() == it.life { // not of before a reset
			on = append(on, *it.copied)
		} else if e, ok := l.p.copyOut(&it.origin); ok {
			on, taken = append(on, e), append(taken, e.loan)
		} else {
			l.count.putsDropped.Add(1)
		}
	}
	if len(on) > 0 {
		using = l.put(ctx, on)
	}
	l.p.giveAfter(ctx, using, append(taken, l.copies(batch)...)...)
}

// lacking is the entries of a batch that the store has not got. If it cannot be asked, none is written.
func (l *lane) lacking(ctx context.Context, batch []putItem) (out []putItem) {
	var keys []pool.Key
	per := 0
	for i := range batch {
		at := len(keys)
		keys = batch[i].life.witnesses(&batch[i].key, batch[i].sp.spec.Shards, keys)
		per = max(per, len(keys)-at)
	}
	status := make([]pool.Status, len(keys))
	within, stop := context.WithTimeout(ctx, l.PutWithin)
	defer stop()
	err := l.Store.Exists(within, keys, status)
	l.result(ctx, err)
	if err != nil {
		l.count.lost.Add(uint64(len(batch)))
		return nil
	}
	for i := range batch {
		n := min(batch[i].sp.spec.Shards, 2)
		if has(status[:n]) {
			l.count.had.Add(1)
			l.written.put(batch[i].print(), true, l.p.now().Add(writtenFor))
		} else {
			out = append(out, batch[i])
		}
		status = status[n:]
	}
	return out
}

// witnesses appends the keys that stand for all shards of an entry in a store: the last shard, which is written first, and the first, which is written last.
func (l *life) witnesses(k *entryKey, shards int, keys []pool.Key) []pool.Key {
	if shards > 1 {
		keys = append(keys, l.key(k, uint8(shards-1)))
	}
	return append(keys, l.key(k, 0))
}

func has(status []pool.Status) bool {
	for _, s := range status {
		if s != pool.OK {
			return false
		}
	}
	return true
}

// leaving is an entry on its way to a store.
type leaving struct {
	origin
	loan  transit.Loan
	items []pool.Item // the last shard first
}

// copyOut copies an entry into staging. False: it is gone, its epoch is over, it is damaged, or staging has no room: then it is not written.
func (p *Pool) copyOut(o *origin) (e leaving, ok bool) {
	g := &o.sp.groups[o.key.group]
	if o.sp.now.Load() != o.life || o.life.epoch == 0 || o.life.off {
		return e, false
	}
	e = leaving{origin: *o, loan: p.o.Staging.Take(g.staged, true)}
	if e.loan.Size == 0 {
		return e, false
	}
	for shard := o.sp.spec.Shards - 1; shard >= 0; shard-- {
		if !p.copyShard(&e, g, uint8(shard)) {
			p.o.Staging.Give(e.loan)
			return e, false
		}
	}
	// What was pinned after a reset has begun may be of the new epoch, and must not go under the name of the old one.
	if o.sp.now.Load() != o.life {
		p.o.Staging.Give(e.loan)
		return e, false
	}
	return e, true
}

// copyShard copies one shard while it is pinned, and checks it.
func (p *Pool) copyShard(e *leaving, g *group, shard uint8) bool {
	h := &e.key.hash
	b := pool.Batch{
		Space: e.key.space, Group: e.key.group, Shard: shard, Hashes: pool.Chain(h.Bytes[:h.Len], int(h.Len)),
		Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1),
	}
	stored := e.life.key(&e.key, shard)
	var hd transit.Header
	var value []byte
	p.glance(&b, func(s pool.Slot) pool.Status {
		at := g.at[shard]
		value = e.loan.Bytes[at : at+transit.HeaderBytes+int64(s.Len)]
		if !p.reach(s, func(b []byte) { copy(value[transit.HeaderBytes:], b) }) {
			return pool.Corrupt
		}
		own := e.sp.ownKey(&e.key, shard)
		hd = transit.Header{Length: s.Len, Sum: pool.Sum(own.Seed(s.Len), value[transit.HeaderBytes:]), Node: p.o.Node, When: uint64(p.now().Unix())}
		if hd.Sum != s.Sum && !p.o.NoSums {
			p.o.Log("", "a block in memory is damaged: it is dropped", nil)
			return pool.Corrupt
		}
		return pool.OK
	})
	if b.Status[0] != pool.OK {
		return false
	}
	hd.Seal(&stored, value)
	e.items = append(e.items, pool.Item{Key: stored, Parent: e.parent, Data: value})
	return true
}

// glance reads one entry of memory. To be written to a tier is no use of it, as far as memory can tell the two apart.
func (p *Pool) glance(b *pool.Batch, read func(s pool.Slot) pool.Status) {
	if p.chilling != nil {
		p.chilling.ReadWithoutTouch(b, read)
		return
	}
	p.memory.Acquire(b)
	if b.Status[0] == pool.OK {
		b.Status[0] = read(b.Slots[0])
		p.memory.Release(b.Slots, b.Status)
	}
}

// put gives entries to the store, and says as get for how long it uses them. The first shard of each, which says that it is there, goes when the others are in.
func (l *lane) put(ctx context.Context, on []leaving) (using <-chan struct{}) {
	within, stop := context.WithTimeout(ctx, l.PutWithin)
	defer stop()
	start := time.Now()
	var first, last []pool.Item
	for i := range on {
		n := len(on[i].items) - 1
		first = append(first, on[i].items[:n]...)
		last = append(last, on[i].items[n])
	}
	whole := make([]bool, len(on))
	err := l.putAll(ctx, within, first)
	if err == nil {
		last = l.readyItems(on, first, last, whole)
		err = l.putAll(ctx, within, last)
	}
	if err != nil {
		l.count.lost.Add(uint64(len(on)))
		return stillUsing(err)
	}
	l.pace.stored(time.Since(start))
	l.tally(on, last, whole)
	return nil
}

// readyItems are the first shards of entries whose other shards are stored.
func (l *lane) readyItems(on []leaving, first, last []pool.Item, whole []bool) (ready []pool.Item) {
	for i := range on {
		n := len(on[i].items) - 1
		whole[i] = true
		for _, it := range first[:n] {
			whole[i] = whole[i] && (it.Status == pool.OK || it.Status == pool.Exists)
			l.wrote1(&it)
		}
		first = first[n:]
		if whole[i] {
			ready = append(ready, last[i])
		}
	}
	return ready
}

// putAll is one Put; without items it does nothing.
func (l *lane) putAll(ctx, within context.Context, items []pool.Item) error {
	if len(items) == 0 {
		return nil
	}
	for i := range items {
		items[i].Status = pool.Busy
	}
	err := l.Store.Put(within, items)
	l.result(ctx, err)
	return err
}

// wrote1 counts the bytes of a shard, and takes note of a full store.
func (l *lane) wrote1(it *pool.Item) {
	switch it.Status {
	case pool.OK:
		l.count.bytesOut.Add(uint64(len(it.Data) - transit.HeaderBytes))
	case pool.Busy:
		if !l.Local { // one of this node says so of single blocks too, and at no cost
			l.full()
		}
	}
}

// tally counts what became of the entries of a put.
func (l *lane) tally(on []leaving, last []pool.Item, whole []bool) {
	for i := range on {
		if !whole[i] {
			l.count.lost.Add(1)
			continue
		}
		it := &last[0]
		last = last[1:]
		l.wrote1(it)
		print := on[i].print()
		switch it.Status {
		case pool.OK:
			l.count.stored.Add(1)
		case pool.Exists:
			l.count.had.Add(1)
		case pool.Busy:
			l.count.full.Add(1)
			continue
		default:
			l.count.lost.Add(1)
			continue
		}
		l.written.put(print, true, l.p.now().Add(writtenFor))
		if !l.Local {
			l.known.forget(print) // it may be known to be absent
		}
	}
}

// stillUsing is what an error of a store says of the data that it was given: closed when that is not used any more. Nil: it is not.
func stillUsing(err error) <-chan struct{} {
	if late := (*pool.InUse)(nil); errors.As(err, &late) {
		return late.Done
	}
	return nil
}

// giveAfter gives loans back once nobody uses them. A stack that closes does not wait: its staging is lent to nobody any more, and another process has its own mapping.
func (p *Pool) giveAfter(ctx context.Context, using <-chan struct{}, loans ...transit.Loan) {
	if using == nil {
		p.giveNow(loans...)
		return
	}
	p.workers.Go(func() {
		select {
		case <-using:
		case <-ctx.Done():
		}
		p.giveNow(loans...)
	})
}

func (p *Pool) giveNow(loans ...transit.Loan) {
	for _, l := range loans {
		p.o.Staging.Give(l)
	}
}
