package tier

import (
	"context"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// question is a batch of entries that a shared store is asked for.
type question struct {
	prints []uint64
	keys   []pool.Key // one or two for each print, see witnesses
	per    int
	done   chan struct{} // closed when it is answered, or was not
	failed bool          // valid when done is closed
}

// asking are the entries of one tier that are being asked for, so that look-ups of one prompt ask once.
type asking struct {
	mu   sync.Mutex
	open map[uint64]*question
}

// answer is the life of a goroutine that asks a shared store.
func (l *lane) answer(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			l.refuse()
			return
		case q := <-l.questions:
			l.ask(ctx, q)
		}
	}
}

// refuse answers what is left in the queue at the end.
func (l *lane) refuse() {
	for {
		select {
		case q := <-l.questions:
			l.conclude(q, true)
		default:
			return
		}
	}
}

func (l *lane) ask(ctx context.Context, q *question) {
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
		l.result(ctx, err)
	} else {
		err = errClosing
	}
	if err != nil {
		l.count.askFailed.Add(1)
		l.conclude(q, true)
		return
	}
	l.pace.asked(time.Since(start))
	now := l.p.now()
	for i, print := range q.prints {
		if has(status[i*q.per : (i+1)*q.per]) {
			l.count.found.Add(1)
			l.known.put(print, true, now.Add(l.FoundFor))
		} else {
			l.known.put(print, false, now.Add(l.AbsentFor))
		}
	}
	l.conclude(q, false)
}

func (l *lane) conclude(q *question, failed bool) {
	l.asking.mu.Lock()
	for _, print := range q.prints {
		delete(l.asking.open, print)
	}
	q.failed = failed
	l.asking.mu.Unlock()
	close(q.done)
}

// Ask implements pool.Tiers.
func (p *Pool) Ask(s pool.SpaceID, asked []pool.Asked, deadline time.Time) (pending bool) {
	sp := p.spaces.get(s)
	if sp == nil {
		return false
	}
	timer := time.NewTimer(time.Until(deadline))
	defer timer.Stop()
	for {
		open := p.inquire(s, sp, asked)
		if len(open) == 0 {
			return false
		}
		answered, late := await(open, timer)
		if late {
			p.countLate()
		}
		if late || !answered {
			return late // nothing will be known soon of tiers that fail
		}
	}
}

// await waits for questions: it says whether some tier answered, and whether time was over before all did.
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

// countLate counts a look-up that goes on without an answer, at the first shared tier.
func (p *Pool) countLate() {
	for _, l := range p.lanes {
		if !l.Local {
			l.count.askTimeouts.Add(1)
			return
		}
	}
}

// inquire asks the shared tiers for what is not known of the chains, and gives the questions that are open.
func (p *Pool) inquire(s pool.SpaceID, sp *space, asked []pool.Asked) (open []*question) {
	now := sp.now.Load()
	if now.epoch == 0 || now.off {
		return nil
	}
	for i := range asked {
		if g := sp.group(asked[i].Group); g != nil {
			open = p.inquireChain(s, sp, now, g, &asked[i], open)
		}
	}
	return open
}

// inquireChain asks for the next entries of one chain: so many as were found of it so far, and askFirst at least, up to the first that no tier has. A sparse chain is asked for whole.
func (p *Pool) inquireChain(s pool.SpaceID, sp *space, now *life, g *group, a *pool.Asked, open []*question) []*question {
	w := looks.Get().(*look)
	defer looks.Put(w)
	h := &a.Hashes
	unknown, found, most := 0, 0, askFirst
	if a.Sparse {
		most = askMost
	}
	var fresh [MaxTiers]*question
walk:
	for from := 0; from < h.N; from += stride {
		w.where = append(w.where[:0], w.present2(min(stride, h.N-from))...)
		p.inMemory(w, s, a.Group, h, from, w.where)
		p.below(w, sp, now, g, a.Group, h, from, w.where)
		for i, at := range w.where {
			if at != nowhere {
				found++
				continue
			}
			told, q := p.inquireOne(sp, now, a.Group, h.At(from+i), &fresh, g)
			if q != nil {
				open = appendOnce(open, q)
			}
			if told == absentEverywhere && !a.Sparse {
				break walk
			}
			if told == unknownYet {
				unknown++
			}
			if unknown >= min(max(most, found), askMost) {
				break walk
			}
		}
	}
	for i, q := range fresh {
		if q != nil && p.lanes[i].submit(q) {
			open = append(open, q)
		}
	}
	return open
}

// What is known of an entry that is nowhere.
const (
	absentEverywhere = iota
	unknownYet
)

// inquireOne adds an entry to the fresh questions of the tiers that have not said anything of it, and gives an open question that it is in already.
func (p *Pool) inquireOne(sp *space, now *life, group uint8, hash []byte, fresh *[MaxTiers]*question, g *group) (told int, in *question) {
	print := now.print(group, hash)
	clock := p.now()
	for _, l := range p.lanes {
		if l.Local || !l.up() || p.slow(l, sp, g) {
			continue
		}
		if _, known := l.known.get(print, clock); known {
			continue
		}
		told = unknownYet
		l.asking.mu.Lock()
		q := l.asking.open[print]
		if q == nil {
			if fresh[l.number] == nil {
				fresh[l.number] = &question{per: min(sp.spec.Shards, 2), done: make(chan struct{})}
			}
			f := fresh[l.number]
			l.asking.open[print] = f
			f.prints = append(f.prints, print)
			k := entryKey{group: group, hash: pool.MakeHash(hash)}
			f.keys = now.witnesses(&k, sp.spec.Shards, f.keys)
		} else if q != fresh[l.number] {
			in = q
		}
		l.asking.mu.Unlock()
	}
	return told, in
}

// submit hands a question in; false: too many wait, and this one is not asked.
func (l *lane) submit(q *question) bool {
	l.count.asked.Add(uint64(len(q.prints)))
	select {
	case l.questions <- q:
		return true
	default:
		l.count.askBusy.Add(1)
		l.conclude(q, true)
		return false
	}
}

func appendOnce(list []*question, q *question) []*question {
	for _, other := range list {
		if other == q {
			return list
		}
	}
	return append(list, q)
}
