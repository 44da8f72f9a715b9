package tier

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// putQueue holds the entries to be written to a tier, oldest first, each once.
type putQueue struct {
	set  map[entryKey]*era
	list []outgoing
	from int // of list; those before are taken
}

// outgoing is an entry to be written to a store: still in memory, or copied to staging.
type outgoing struct {
	origin
	loan  transit.Loan
	items []pool.Item // the last shard first; nil: it is not copied yet
}

func (q *putQueue) len() int { return len(q.list) - q.from }

// take removes and returns a batch.
func (q *putQueue) take(l *level) (batch []outgoing) {
	bytes, items := int64(0), 0
	for q.from < len(q.list) {
		o := &q.list[q.from]
		g := &o.sp.groups[o.key.group]
		if len(batch) > 0 && (bytes+g.staged > l.BatchBytes || items+len(g.at) > l.BatchItems) {
			break
		}
		batch = append(batch, *o)
		bytes, items = bytes+g.staged, items+len(g.at)
		if q.set[o.key] == o.era {
			delete(q.set, o.key)
		}
		*o = outgoing{}
		q.from++
	}
	if q.from == len(q.list) || q.from > 4096 {
		q.list = append(q.list[:0], q.list[q.from:]...)
		q.from = 0
	}
	return batch
}

// queueLocked queues an entry to be written, unless it is queued already or there is no room. If it
// returns false, a copy is still the caller's.
func (l *level) queueLocked(e outgoing) bool {
	if !l.acceptsLocked(&e.origin) {
		return false
	}
	l.puts.set[e.key] = e.era
	l.puts.list = append(l.puts.list, e)
	l.wake.Signal()
	return true
}

// takeCopies returns the loans of the entries' copies, and takes them off the level's share of
// staging.
func (l *level) takeCopies(batch []outgoing) (loans []transit.Loan) {
	for i := range batch {
		loans = append(loans, batch[i].loan)
		l.copied.Add(-batch[i].loan.Size)
	}
	return loans
}

// acceptsLocked reports whether an entry can be queued: its space uses tiers, it is not queued
// already in this epoch, and there is room. It counts an entry without room as dropped.
func (l *level) acceptsLocked(o *origin) bool {
	if o.era.off || l.puts.set[o.key] == o.era || l.p.mu.closed {
		return false
	}
	if l.puts.len() >= l.PutQueue {
		l.count.putsDropped.Add(1)
		return false
	}
	return true
}

// queueDelete queues keys to be deleted. Without room it drops them; they will be found damaged
// again.
func (l *level) queueDelete(keys []pool.Key) {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	if len(l.deletes)+len(keys) > deleteQueue || l.p.mu.closed {
		l.count.deletesDropped.Add(uint64(len(keys)))
		return
	}
	l.deletes = append(l.deletes, keys...)
	l.wake.Signal()
}

// remove deletes keys. It does not retry.
func (l *level) remove(ctx context.Context, keys []pool.Key) {
	within, stop := context.WithTimeout(ctx, l.PutWithin)
	defer stop()
	err := l.Store.Delete(within, keys)
	l.countResult(ctx, err)
	if err != nil {
		l.count.deletesDropped.Add(uint64(len(keys)))
		return
	}
	l.count.deleted.Add(uint64(len(keys)))
}

// Writing on eviction. While memory is nearly full, the next entries to be evicted are copied to
// staging, both periodically and before each reservation, and written to the tiers from there.
// An entry for which staging has no room is written only if memory still holds it by then. Entries
// that a policy evicts out of turn, or while the tier is down, are not written.
const (
	coldEvery = 20 * time.Millisecond
	coldFrom  = 0.9 // part of memory in use above which entries are copied
	coldMany  = 256 // entries examined each time
	// coldCopies is the part of staging that all copies together may take: 1/coldCopies, half of
	// what writers may take. Each tier that writes on eviction has an equal share.
	coldCopies = 4
)

// evictWriter offers entries that are about to be evicted to the tiers that write on eviction.
type evictWriter struct {
	levels []*level    // that write on eviction
	near   atomic.Bool // memory is nearly full

	mu     sync.Mutex // held while the coldest entries are examined
	closed bool       // staging is about to be unmapped
	out    []pool.Cold
}

// close waits for an examination in progress and prevents further ones.
func (c *evictWriter) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// evictLoop offers the coldest entries periodically.
func (p *Pool) evictLoop(ctx context.Context) {
	tick := time.NewTicker(coldEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s := p.Memory.Stats()
		p.onEvict.near.Store(float64(s.Used) >= coldFrom*float64(s.Capacity))
		p.offerColdest()
	}
}

// offerColdest offers the coldest entries to the tiers that write on eviction while memory is
// nearly full.
func (p *Pool) offerColdest() {
	c := &p.onEvict
	if len(c.levels) == 0 || !c.near.Load() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || !slices.ContainsFunc(c.levels, (*level).up) {
		return
	}
	for _, cold := range c.out[:p.Coldest(c.out)] {
		p.offerCold(&cold)
	}
}

func (p *Pool) offerCold(cold *pool.Cold) {
	sp := p.spaces.get(cold.Space)
	g := sp.group(cold.Group)
	if g == nil {
		return
	}
	o := origin{key: entryKey{cold.Space, cold.Group, cold.Hash}, sp: sp, era: sp.now.Load()}
	digest, now := o.digest(), p.now()
	for _, l := range p.onEvict.levels {
		if there, _ := l.written.get(digest, now); !there && l.up() && l.queueCold(outgoing{origin: o}, g) {
			// Not written yet, but it must not be copied again meanwhile.
			l.written.put(digest, true, now.Add(l.PutWithin))
		}
	}
}

// queueCold queues an entry, and copies it first if the tier's share of staging has room.
func (l *level) queueCold(e outgoing, g *group) bool {
	p := l.p
	p.mu.Lock()
	accepts := l.acceptsLocked(&e.origin)
	p.mu.Unlock()
	if !accepts {
		return false
	}
	share := p.o.Staging.Size() / coldCopies / int64(len(p.onEvict.levels))
	if l.copied.Load()+g.staged <= share && p.copyOut(&e) {
		l.copied.Add(e.loan.Size)
	}
	p.mu.Lock()
	queued := l.queueLocked(e)
	p.mu.Unlock()
	if !queued {
		p.returnLoans(l.takeCopies([]outgoing{e})...)
	}
	return queued
}
