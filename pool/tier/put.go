package tier

import (
	"context"
	"errors"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

func (o *origin) digest() uint64 {
	return o.era.digest(o.key.group, o.key.hash.Bytes[:o.key.hash.Len])
}

// writtenFor is how long an entry that was written is not offered again. A tier may drop it
// meanwhile.
const writtenFor = 10 * time.Minute

// outgoing is an entry that was copied to staging, to be written to a store.
type outgoing struct {
	origin
	loan  transit.Loan
	items []pool.Item // the last shard first
}

// write stores a batch of entries. It skips those that the store has, and copies the others out of
// memory; an entry is pinned only while it is copied.
func (l *level) write(ctx context.Context, batch []origin) {
	var on []outgoing
	var loans []transit.Loan
	missing := l.notStored(ctx, batch)
	ended := l.paced(ctx, missing)
	for _, o := range missing {
		if e := (outgoing{origin: o}); l.p.copyOut(&e) {
			on, loans = append(on, e), append(loans, e.loan)
		} else {
			l.count.add(func(t *pool.TierStatus) { t.Dropped++ })
		}
	}
	ended()
	if len(on) > 0 {
		l.p.returnAfter(ctx, l.put(ctx, on), loans...)
	}
}

// paced waits until a batch may be copied out of memory. It holds no staging meanwhile. ended is to
// be called after the copies.
func (l *level) paced(ctx context.Context, batch []origin) (ended func()) {
	bytes := int64(0)
	for i := range batch {
		bytes += batch[i].sp.groups[batch[i].key.group].staged
	}
	if l.p.o.Pace == nil || bytes == 0 || l.Workers == 1 {
		return func() {}
	}
	return l.p.o.Pace(ctx, bytes)
}

// notStored returns the entries of a batch that the store lacks; none if it does not answer.
func (l *level) notStored(ctx context.Context, batch []origin) (out []origin) {
	var keys []pool.Key
	per := 0
	for i := range batch {
		at := len(keys)
		keys = batch[i].era.boundaryKeys(&batch[i].key, batch[i].sp.spec.Shards, keys)
		per = max(per, len(keys)-at)
	}
	status := make([]pool.Status, len(keys))
	within, stop := context.WithTimeout(ctx, l.PutWithin)
	defer stop()
	err := l.Store.Exists(within, keys, status)
	l.countResult(ctx, asks, err)
	if err != nil {
		l.count.add(func(t *pool.TierStatus) { t.Lost += uint64(len(batch)) })
		return nil
	}
	for i := range batch {
		n := min(batch[i].sp.spec.Shards, 2)
		if has(status[:n]) {
			l.count.add(func(t *pool.TierStatus) { t.Had++ })
			l.written.put(batch[i].digest(), true, l.p.now().Add(writtenFor))
		} else {
			out = append(out, batch[i])
		}
		status = status[n:]
	}
	return out
}

// boundaryKeys appends the keys that stand for all shards of an entry in a store: the last shard,
// which is written first, and the first shard, which is written last.
func (e *era) boundaryKeys(k *entryKey, shards int, keys []pool.Key) []pool.Key {
	if shards > 1 {
		keys = append(keys, e.key(k, uint8(shards-1)))
	}
	return append(keys, e.key(k, 0))
}

func has(status []pool.Status) bool {
	for _, s := range status {
		if s != pool.OK {
			return false
		}
	}
	return true
}

// copyOut copies an entry into staging. It returns false if the entry is not in memory any more or
// is damaged, its epoch is over, or staging has no room; the entry is then not written.
func (p *Pool) copyOut(e *outgoing) bool {
	g := &e.sp.groups[e.key.group]
	if e.sp.now.Load() != e.era || e.era.epoch == 0 || e.era.off {
		return false
	}
	if e.loan = p.o.Staging.Take(g.staged, true); e.loan.Size == 0 {
		return false
	}
	whole := true
	for shard := e.sp.spec.Shards - 1; shard >= 0 && whole; shard-- {
		whole = p.copyShard(e, g, uint8(shard))
	}
	// A copy made during a reset may be of the new epoch, and must not go under the old name.
	if !whole || e.sp.now.Load() != e.era {
		p.o.Staging.Return(e.loan)
		return false
	}
	return true
}

// copyShard copies one shard while it is pinned, and verifies it.
func (p *Pool) copyShard(e *outgoing, g *group, shard uint8) bool {
	h := &e.key.hash
	b := pool.Batch{
		Space: e.key.space, Group: e.key.group, Shard: shard, Hashes: pool.Chain(h.Bytes[:h.Len], int(h.Len)),
		Status: make([]pool.Status, 1), Slots: make([]pool.Slot, 1),
	}
	stored := e.era.key(&e.key, shard)
	if p.Memory.Acquire(&b); b.Status[0] != pool.OK {
		return false
	}
	s := b.Slots[0]
	at := g.at[shard]
	value := e.loan.Bytes[at : at+transit.HeaderBytes+int64(s.Len)]
	whole := p.reach(s, func(b []byte) { copy(value[transit.HeaderBytes:], b) })
	own := e.sp.ownKey(&e.key, shard)
	hd := transit.Header{
		Length: s.Len,
		Sum:    pool.Sum(own.Seed(s.Len), value[transit.HeaderBytes:]),
		Node:   p.o.Node,
		When:   uint64(p.now().Unix()),
	}
	if whole && hd.Sum != s.Sum && !p.o.NoSums {
		p.o.Log("", "dropped a damaged block in memory", nil)
		whole = false
	}
	if !whole {
		b.Status[0] = pool.Corrupt
	}
	p.Memory.Release(b.Slots, b.Status)
	if !whole {
		return false
	}
	hd.Seal(&stored, value)
	e.items = append(e.items, pool.Item{Key: stored, Parent: e.parent, Data: value})
	return true
}

// put stores entries. The first shard of each goes last, after all its other shards were stored. If
// using is not nil, the store may read the data until it is closed.
func (l *level) put(ctx context.Context, on []outgoing) (using <-chan struct{}) {
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
		l.count.add(func(t *pool.TierStatus) { t.Lost += uint64(len(on)) })
		return stillUsing(err)
	}
	l.count.add(func(t *pool.TierStatus) { smooth(&t.PutSeconds, start) })
	l.tally(on, last, whole)
	return nil
}

// readyItems returns the first shards of the entries whose other shards are stored.
func (l *level) readyItems(on []outgoing, first, last []pool.Item, whole []bool) (ready []pool.Item) {
	for i := range on {
		n := len(on[i].items) - 1
		whole[i] = true
		for _, it := range first[:n] {
			whole[i] = whole[i] && (it.Status == pool.OK || it.Status == pool.Exists)
			l.countPut(&it)
		}
		first = first[n:]
		if whole[i] {
			ready = append(ready, last[i])
		}
	}
	return ready
}

func (l *level) putAll(ctx, within context.Context, items []pool.Item) error {
	if len(items) == 0 {
		return nil
	}
	for i := range items {
		items[i].Status = pool.Busy
	}
	err := l.Store.Put(within, items)
	l.countResult(ctx, moves, err)
	return err
}

// countPut counts the bytes of a shard, and pauses writes to a full store.
func (l *level) countPut(it *pool.Item) {
	switch it.Status {
	case pool.OK:
		l.count.add(func(t *pool.TierStatus) { t.BytesOut += uint64(len(it.Data) - transit.HeaderBytes) })
	case pool.Busy:
		if !l.Local { // a local one refuses single blocks too, and cheaply
			l.full()
		}
	}
}

// tally counts the outcome for each entry of a put.
func (l *level) tally(on []outgoing, last []pool.Item, whole []bool) {
	for i := range on {
		if !whole[i] {
			l.count.add(func(t *pool.TierStatus) { t.Lost++ })
			continue
		}
		it := &last[0]
		last = last[1:]
		l.countPut(it)
		digest := on[i].digest()
		switch it.Status {
		case pool.OK:
			l.count.add(func(t *pool.TierStatus) { t.Stored++ })
		case pool.Exists:
			l.count.add(func(t *pool.TierStatus) { t.Had++ })
		case pool.Busy:
			l.count.add(func(t *pool.TierStatus) { t.Full++ })
			continue
		default:
			l.count.add(func(t *pool.TierStatus) { t.Lost++ })
			continue
		}
		l.written.put(digest, true, l.p.now().Add(writtenFor))
		if !l.Local {
			l.exists.put(digest, false, l.p.now()) // unknown: it may be cached as absent
		}
	}
}

// stillUsing returns the channel that is closed when a store no longer uses the data of a call that
// returned err; nil if it does not use it now.
func stillUsing(err error) <-chan struct{} {
	if late := (*pool.InUse)(nil); errors.As(err, &late) {
		return late.Done
	}
	return nil
}

// returnAfter returns loans when using is closed, or the pool is. A closing pool does not wait: it
// lends no staging any more, and another process has its own mapping.
func (p *Pool) returnAfter(ctx context.Context, using <-chan struct{}, loans ...transit.Loan) {
	if using == nil {
		p.returnLoans(loans...)
		return
	}
	p.workers.Go(func() {
		select {
		case <-using:
		case <-ctx.Done():
		}
		p.returnLoans(loans...)
	})
}

func (p *Pool) returnLoans(loans ...transit.Loan) {
	for _, l := range loans {
		p.o.Staging.Return(l)
	}
}

// use is a look-up that found entries in memory, for the tiers that write on second use.
type use struct {
	space pool.SpaceID
	group uint8
	h     pool.Hashes
	first pool.Hash // before the chain
}

// used queues a chain that was found in memory. It drops the chain if there is no room.
func (p *Pool) used(s pool.SpaceID, group uint8, h pool.Hashes) {
	if len(p.uses) == cap(p.uses) {
		return
	}
	blob := make([]byte, 0, h.N*h.Len)
	for i := range h.N {
		blob = append(blob, h.At(i)...)
	}
	select {
	case p.uses <- use{space: s, group: group, h: pool.Chain(blob, h.Len), first: parentOf(&h, 0)}:
	default:
	}
}

// offerUses offers what was used again to the tiers that write on second use, until ctx ends.
func (p *Pool) offerUses(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case u := <-p.uses:
			p.offerUse(&u)
		}
	}
}

func (p *Pool) offerUse(u *use) {
	sp := p.spaces.get(u.space)
	if sp.group(u.group) == nil {
		return
	}
	o := origin{parent: u.first, sp: sp, era: sp.now.Load()}
	for i := range u.h.N {
		o.key = entryKey{u.space, u.group, pool.MakeHash(u.h.At(i))}
		p.offerUsed(&o)
		o.parent = o.key.hash
	}
}

// offerUsed offers an entry to the tiers that write on second use and were not given it lately.
func (p *Pool) offerUsed(o *origin) {
	digest, now := o.digest(), p.now()
	for _, l := range p.levels {
		if l.Write != OnSecondUse {
			continue
		}
		if there, _ := l.written.get(digest, now); !there {
			p.mu.Lock()
			l.queueLocked(*o)
			p.mu.Unlock()
		}
	}
}
