package tier

import (
	"context"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// puts is the queue of entries to be written to a tier, oldest first, each once.
type puts struct {
	set  map[entryKey]*life
	list []putItem
	from int // of the list; what is before is gone
}

// putItem is an entry to be written: in memory, as long as it stays there, or copied out of it.
type putItem struct {
	origin
	copied *leaving // nil: it is still to be copied
}

func (q *puts) len() int { return len(q.list) - q.from }

// take gives a batch.
func (q *puts) take(l *lane) (batch []putItem) {
	bytes, items := int64(0), 0
	for q.from < len(q.list) {
		o := &q.list[q.from]
		g := &o.sp.groups[o.key.group]
		if len(batch) > 0 && (bytes+g.staged > l.BatchBytes || items+len(g.at) > l.BatchItems) {
			break
		}
		batch = append(batch, *o)
		bytes, items = bytes+g.staged, items+len(g.at)
		if q.set[o.key] == o.life {
			delete(q.set, o.key)
		}
		*o = putItem{}
		q.from++
	}
	if q.from == len(q.list) || q.from > 4096 {
		q.list = append(q.list[:0], q.list[q.from:]...)
		q.from = 0
	}
	return batch
}

// offerLocked queues an entry to be written, unless it waits already or there is no room.
func (l *lane) offerLocked(o origin) { l.queueLocked(putItem{origin: o}) }

// queueLocked is offerLocked for one that may have been copied. False: it is not in the queue now, and its copy is still the caller's.
func (l *lane) queueLocked(it putItem) bool {
	if !l.takesLocked(&it.origin) {
		return false
	}
	l.puts.set[it.key] = it.life
	l.puts.list = append(l.puts.list, it)
	l.wake.Signal()
	return true
}

// copies are the loans of what was copied of entries, which count as copies of what is about to go no more.
func (l *lane) copies(batch []putItem) (loans []transit.Loan) {
	for i := range batch {
		if e := batch[i].copied; e != nil {
			loans = append(loans, e.loan)
			l.copied.Add(-e.loan.Size)
		}
	}
	return loans
}

// takesLocked says whether an entry can be queued: it does not wait already, one of before a reset not counted, and there is room. One for which there is none is
// counted as dropped.
func (l *lane) takesLocked(o *origin) bool {
	if l.puts.set[o.key] == o.life || l.p.mu.closed {
		return false
	}
	if l.puts.len() >= l.PutQueue {
		l.count.putsDropped.Add(1)
		return false
	}
	return true
}

// queueDelete queues keys to be deleted; what finds no room is forgotten, and found wrong again one day.
func (l *lane) queueDelete(keys []pool.Key) {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	if len(l.deletes)+len(keys) > deleteQueue || l.p.mu.closed {
		l.count.deletesDropped.Add(uint64(len(keys)))
		return
	}
	l.deletes = append(l.deletes, keys...)
	l.wake.Signal()
}

// remove deletes keys. What fails is not tried again.
func (l *lane) remove(ctx context.Context, keys []pool.Key) {
	within, stop := context.WithTimeout(ctx, l.PutWithin)
	defer stop()
	err := l.Store.Delete(within, keys)
	l.result(ctx, err)
	if err != nil {
		l.count.deletesDropped.Add(uint64(len(keys)))
		return
	}
	l.count.deleted.Add(uint64(len(keys)))
}

// line is a queue of promises, the oldest first.
type line struct {
	lane       *lane
	head, tail *promise
	n          int
}

func (q *line) push(pr *promise) {
	pr.line, pr.prev, pr.next = q, q.tail, nil
	if q.tail == nil {
		q.head = pr
	} else {
		q.tail.next = pr
	}
	q.tail = pr
	q.n++
}

func (pr *promise) leave() {
	q := pr.line
	if q == nil {
		return
	}
	if pr.prev == nil {
		q.head = pr.next
	} else {
		pr.prev.next = pr.next
	}
	if pr.next == nil {
		q.tail = pr.prev
	} else {
		pr.next.prev = pr.prev
	}
	pr.line, pr.prev, pr.next = nil, nil, nil
	q.n--
}
