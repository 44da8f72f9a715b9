package tier

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// question is a batch of entries to look up in a shared store.
type question struct {
	digests []uint64
	keys    []pool.Key    // one or two for each digest, see boundaryKeys
	per     int           // keys for each digest
	done    chan struct{} // closed when the question is over
	failed  bool          // no answer came; valid after done is closed
}

// asking holds the entries of one tier that are part of an open question, so that several look-ups
// of one prompt ask once.
type asking struct {
	mu   sync.Mutex
	open map[uint64]*question
}

// askLoop asks a shared store until ctx ends.
func (l *level) askLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			l.failQueued()
			return
		case q := <-l.questions:
			l.ask(ctx, q)
		}
	}
}

// failQueued fails the questions that are still queued when the pool closes.
func (l *level) failQueued() {
	for {
		select {
		case q := <-l.questions:
			l.finish(q, true)
		default:
			return
		}
	}
}

func (l *level) ask(ctx context.Context, q *question) {
	status := make([]pool.Status, len(q.keys))
	for i := range status {
		status[i] = pool.Busy
	}
	within, stop := context.WithTimeout(ctx, l.AskWithin)
	defer stop()
	start := time.Now()
	var err error
	if l.up() { // it may have failed while the question waited
		err = l.Store.Exists(within, q.keys, status)
		l.countResult(ctx, asks, err)
	} else {
		err = errClosing
	}
	if err != nil {
		l.count.add(func(t *pool.TierStatus) { t.AskFailed++ })
		l.finish(q, true)
		return
	}
	l.count.add(func(t *pool.TierStatus) { smooth(&t.AskSeconds, start) })
	now := l.p.now()
	for i, digest := range q.digests {
		if has(status[i*q.per : (i+1)*q.per]) {
			l.count.add(func(t *pool.TierStatus) { t.Found++ })
			l.exists.put(digest, true, now.Add(l.FoundFor))
		} else {
			l.exists.put(digest, false, now.Add(l.AbsentFor))
		}
	}
	l.finish(q, false)
}

func (l *level) finish(q *question, failed bool) {
	l.asking.mu.Lock()
	for _, digest := range q.digests {
		delete(l.asking.open, digest)
	}
	q.failed = failed
	l.asking.mu.Unlock()
	close(q.done)
}

// Ask implements pool.Tiers.
func (p *Pool) Ask(s pool.SpaceID, asked []pool.Asked, deadline time.Time, anew bool) (pending bool) {
	sp := p.spaces.get(s)
	if sp == nil {
		return false
	}
	since := time.Time{} // answers from before it that an entry is absent do not count
	if anew {
		since = p.now()
	}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	for {
		open := p.askTiers(s, sp, asked, since)
		if len(open) == 0 {
			return false
		}
		answered, late := await(open, timer)
		if late {
			p.countLate()
		}
		if late || !answered {
			return late // a tier that fails will not answer soon
		}
	}
}

// Shared implements pool.Tiers.
func (p *Pool) Shared() bool {
	for _, l := range p.levels {
		if !l.Local && (l.up() || l.breaker.brief()) {
			return true
		}
	}
	return false
}

// await waits for questions. It reports whether any tier answered and whether the timer fired
// before all were over.
func await(open []*question, timer *time.Timer) (answered, late bool) {
	for _, q := range open {
		select {
		case <-q.done:
			answered = answered || !q.failed
		case <-timer.C:
			return answered, true
		}
	}
	return answered, false
}

// countLate counts, at the first shared tier, a look-up that goes on without an answer.
func (p *Pool) countLate() {
	for _, l := range p.levels {
		if !l.Local {
			l.count.add(func(t *pool.TierStatus) { t.AskLate++ })
			return
		}
	}
}

// askTiers asks the shared tiers for entries of which nothing is known. It returns open questions.
func (p *Pool) askTiers(s pool.SpaceID, sp *space, asked []pool.Asked, since time.Time) (open []*question) {
	now := sp.now.Load()
	if now.epoch == 0 || now.off {
		return nil
	}
	for i := range asked {
		if sp.group(asked[i].Group) != nil {
			open = p.askChain(s, sp, now, &asked[i], since, open)
		}
	}
	return open
}

// askChain asks for the next entries of one chain: as many as were found of it so far and at least
// askFirst, up to the first entry that no tier has. It asks for all of a sparse chain.
func (p *Pool) askChain(
	s pool.SpaceID, sp *space, now *era, a *pool.Asked, since time.Time, open []*question,
) []*question {
	w := scratchPool.Get().(*scratch)
	defer scratchPool.Put(w)
	h := &a.Hashes
	unknown, found, most := 0, 0, askFirst
	if a.Sparse {
		most = askMost
	}
	var fresh [MaxTiers]*question
walk:
	for from := 0; from < h.N; from += stride {
		w.where = append(w.where[:0], noneThere[:min(stride, h.N-from)]...)
		p.markInMemory(w, s, a.Group, h, from, w.where)
		p.markInTiers(w, sp, now, a.Group, h, from, w.where)
		for i, at := range w.where {
			if at != nowhere {
				found++
				continue
			}
			asked, q := p.askEntry(sp, now, a.Group, h.At(from+i), since, &fresh)
			if q != nil && !slices.Contains(open, q) {
				open = append(open, q)
			}
			if !asked && !a.Sparse {
				break walk
			}
			if asked {
				unknown++
			}
			if unknown >= min(max(most, found), askMost) {
				break walk
			}
		}
	}
	for i, q := range fresh {
		if q != nil && p.levels[i].submit(q) {
			open = append(open, q)
		}
	}
	return open
}

// askEntry adds an entry to the new questions of the tiers whose answer is not cached, and returns
// an open question that already contains it. asked is false if all answers are cached.
func (p *Pool) askEntry(
	sp *space, now *era, group uint8, hash []byte, since time.Time, fresh *[MaxTiers]*question,
) (asked bool, in *question) {
	digest := now.digest(group, hash)
	clock := p.now()
	for _, l := range p.levels {
		if l.Local || !l.up() {
			continue
		}
		there, until := l.exists.get(digest, clock)
		if !until.IsZero() && (there || !until.Add(-l.AbsentFor).Before(since)) {
			continue
		}
		asked = true
		l.asking.mu.Lock()
		q := l.asking.open[digest]
		if q == nil {
			if fresh[l.number] == nil {
				fresh[l.number] = &question{per: min(sp.spec.Shards, 2), done: make(chan struct{})}
			}
			f := fresh[l.number]
			l.asking.open[digest] = f
			f.digests = append(f.digests, digest)
			k := entryKey{group: group, hash: pool.MakeHash(hash)}
			f.keys = now.boundaryKeys(&k, sp.spec.Shards, f.keys)
		} else if q != fresh[l.number] {
			in = q
		}
		l.asking.mu.Unlock()
	}
	return asked, in
}

// submit queues a question; false if too many are waiting: it is over then, without an answer.
func (l *level) submit(q *question) bool {
	l.count.add(func(t *pool.TierStatus) { t.Asked += uint64(len(q.digests)) })
	select {
	case l.questions <- q:
		return true
	default:
		l.count.add(func(t *pool.TierStatus) { t.AskRefused++ })
		l.finish(q, true)
		return false
	}
}
