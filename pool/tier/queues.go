package tier

import (
	"context"

	"github.com/kvagent/kvagent/pool"
)

// putQueue holds the entries to be written to a tier, oldest first, each once.
type putQueue struct {
	set  map[entryKey]*era
	list []origin
	from int // of list; those before are taken
}

func (q *putQueue) len() int { return len(q.list) - q.from }

func (q *putQueue) take(l *level) (batch []origin) {
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
		*o = origin{}
		q.from++
	}
	if q.from == len(q.list) || q.from > 4096 {
		q.list = append(q.list[:0], q.list[q.from:]...)
		q.from = 0
	}
	return batch
}

// queueLocked queues an entry to be written, if its space uses tiers and it is not queued already
// in this epoch. It counts one without room as dropped.
func (l *level) queueLocked(o origin) {
	if o.era.off || l.puts.set[o.key] == o.era || l.p.mu.closed {
		return
	}
	if l.puts.len() >= l.PutQueue {
		l.count.add(func(t *pool.TierStatus) { t.Dropped++ })
		return
	}
	l.puts.set[o.key] = o.era
	l.puts.list = append(l.puts.list, o)
	l.wake.Signal()
}

// queueRemovals queues values to be deleted. It forgets those without room: the next fetch finds
// them damaged again.
func (l *level) queueRemovals(keys []pool.Key) {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.removals = append(l.removals, keys[:min(len(keys), removalQueue-len(l.removals))]...)
	l.wake.Signal()
}

// remove deletes keys. It does not retry.
func (l *level) remove(ctx context.Context, keys []pool.Key) {
	within, stop := context.WithTimeout(ctx, l.PutWithin)
	defer stop()
	err := l.Store.Delete(within, keys)
	l.countResult(ctx, asks, err)
	if err == nil {
		l.count.add(func(t *pool.TierStatus) { t.Deleted += uint64(len(keys)) })
	}
}
