package keep

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// Expire ends the pins whose time is over or whose space was reset, and then drops the blocks whose
// time is over.
func (l *Ledger) Expire() {
	now := l.now()
	l.memory.Unpin(l.ended(func(p *pin, epoch uint32) bool { return p.epoch != epoch || !p.until.After(now) }))
	for b, ok := l.due(now); ok; b, ok = l.due(now) {
		n := 0
		if l.memory.Epoch(b.space) == b.epoch {
			n = l.memory.DropBrief(b.space, b.group, b.hashes)
		}
		l.mu.Lock()
		l.dropped += uint64(n)
		l.mu.Unlock()
	}
}

// Close ends all pins, and forgets what was to be dropped.
func (l *Ledger) Close() {
	l.memory.Unpin(l.ended(func(*pin, uint32) bool { return true }))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.brief, l.waiting = nil, 0
}

// Report returns the ledger's state and counters.
func (l *Ledger) Report() Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Report{
		Blocks: len(l.pinned), Bytes: l.bytes, Budget: l.budget, Brief: l.waiting,
		Refused: l.refused, Dropped: l.dropped,
	}
}

// ended removes the pins that are over, and returns their refs: each chain from its start on, as
// Unpin keeps its order. epoch is the present one of the pin's space.
func (l *Ledger) ended(over func(p *pin, epoch uint32) bool) []pool.Ref {
	type numbered struct {
		ref    pool.Ref
		serial uint64
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []numbered
	epochs := make(map[pool.SpaceID]uint32)
	for ref, p := range l.pinned {
		epoch, known := epochs[p.space]
		if !known {
			epoch = l.memory.Epoch(p.space)
			epochs[p.space] = epoch
		}
		if over(&p, epoch) {
			delete(l.pinned, ref)
			l.bytes -= p.bytes
			all = append(all, numbered{ref, p.serial})
		}
	}
	slices.SortFunc(all, func(a, b numbered) int { return cmp.Compare(a.serial, b.serial) })
	refs := make([]pool.Ref, len(all))
	for i := range all {
		refs[i] = all[i].ref
	}
	return refs
}

// due removes the first blocks whose time is over.
func (l *Ledger) due(now time.Time) (b brief, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.brief) == 0 || l.brief[0].at.After(now) {
		return b, false
	}
	b = heap.Pop(&l.brief).(brief)
	l.waiting -= b.hashes.N
	return b, true
}

// briefs is a heap, the next to be dropped first.
type briefs []brief

func (h briefs) Len() int           { return len(h) }
func (h briefs) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h briefs) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *briefs) Push(b any)        { *h = append(*h, b.(brief)) }

func (h *briefs) Pop() any {
	last := len(*h) - 1
	b := (*h)[last]
	(*h)[last] = brief{}
	*h = (*h)[:last]
	return b
}
