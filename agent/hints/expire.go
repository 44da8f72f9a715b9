package hints

import (
	"container/heap"
	"time"
)

// Expire ends what has reached its time: pins, those of spaces that were reset, too, and other
// actions.
func (l *Ledger) Expire() {
	now := l.c.Now()
	l.mu.Lock()
	refs := l.mu.pins.take(func(p *pin) bool { return p.epoch != l.c.Memory.Epoch(p.space) || !p.until.After(now) })
	l.mu.Unlock()
	l.c.Memory.Unpin(refs)
	for w := l.ended(now); w != nil; w = l.ended(now) {
		l.conclude(w)
	}
}

// ended removes the first wish whose time is over.
func (l *Ledger) ended(now time.Time) *wish {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.mu.wishes) == 0 || l.mu.wishes[0].at.After(now) {
		return nil
	}
	w := heap.Pop(&l.mu.wishes).(*wish)
	l.leaveLocked(w)
	return w
}

// conclude ends a wish, and tells of one that was deferred.
func (l *Ledger) conclude(w *wish) {
	l.mu.Lock()
	l.concludeLocked(w)
	r := *w.receipt
	l.mu.Unlock()
	if w.later != nil && w.action.Kind == Drop {
		w.later(r)
	}
}

// concludeLocked drops the blocks of a wish that says so, and counts which blocks of another were
// used.
func (l *Ledger) concludeLocked(w *wish) {
	r := w.receipt
	if r.Over = true; l.c.Memory.Epoch(w.space) != w.epoch {
		return
	}
	if w.action.Kind == Drop {
		r.State, r.Reason = Accepted, ""
		l.drop(w)
		return
	}
	used, idle := 0, 0
	for i := range w.chains {
		stored, unused, _ := l.c.Memory.CountUnused(w.space, w.chains[i].Group, w.chains[i].Hashes)
		used, idle = used+stored-unused, idle+unused
	}
	r.Helped, r.InVain = used, idle
	if w.action.Kind == Demote {
		r.Helped, r.InVain = max(0, r.Blocks-used), used
	}
	l.mu.count.Helped += uint64(r.Helped)
	l.mu.count.InVain += uint64(r.InVain)
}

// wishes is a heap, the next to end first.
type wishes []*wish

func (h wishes) Len() int           { return len(h) }
func (h wishes) Less(i, j int) bool { return h[i].at.Before(h[j].at) }

func (h wishes) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *wishes) Push(w any) {
	one := w.(*wish)
	one.index = len(*h)
	*h = append(*h, one)
}

func (h *wishes) Pop() any {
	last := len(*h) - 1
	w := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return w
}
