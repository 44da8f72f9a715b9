package hints

import (
	"container/heap"
	"context"
	"fmt"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// startLocked carries out a wish, and keeps it if it goes on.
func (l *Ledger) startLocked(w *wish) {
	stored, bytes := l.stored(w)
	r := w.receipt
	r.Blocks, r.Bytes = stored, bytes
	if stored == 0 && w.action.Kind < Prefetch {
		r.State, r.Reason = Missing, "memory has none of the blocks"
		return
	}
	if stored == w.blocks && w.action.Kind >= Prefetch { // perhaps the request itself has fetched them meanwhile
		r.Reason = "memory has all of the blocks"
		return
	}
	switch w.action.Kind {
	case Retain, Demote:
		l.rankLocked(w)
	case Pin:
		l.pinLocked(w)
	case Drop:
		l.dropLocked(w)
	case Prefetch:
		l.prefetchLocked(w, stored)
	case Fetch:
		l.fetchLocked(w, stored)
	}
}

// stored returns how many of a wish's blocks memory has, and their bytes.
func (l *Ledger) stored(w *wish) (blocks int, bytes int64) {
	for i := range w.chains {
		c := &w.chains[i]
		n, _, each := l.c.Memory.CountUnused(w.space, c.Group, c.Hashes)
		blocks, bytes = blocks+n, bytes+int64(n)*each
	}
	return blocks, bytes
}

// account returns what the wishes of a session take; mu is held.
func (l *Ledger) account(w *wish) *account {
	if a := l.mu.accounts[w.session]; a != nil {
		return a
	}
	return &account{}
}

// enterLocked accounts a wish to its session.
func (l *Ledger) enterLocked(w *wish) {
	a := l.account(w)
	l.mu.accounts[w.session] = a
	a.blocks += w.blocks
	l.mu.blocks += w.blocks
	l.mu.pending++
	if w.retained > 0 {
		a.retained += w.retained
		l.mu.retained += w.retained
		a.retains = append(a.retains, w)
	}
}

// leaveLocked is the reverse of enterLocked.
func (l *Ledger) leaveLocked(w *wish) {
	a := l.account(w)
	a.blocks -= w.blocks
	l.mu.pending--
	a.retained -= w.retained
	l.mu.blocks -= w.blocks
	l.mu.retained -= w.retained
	a.retains = slices.DeleteFunc(a.retains, func(one *wish) bool { return one == w })
	if a.blocks == 0 {
		delete(l.mu.accounts, w.session)
	}
}

// goOnLocked keeps a wish until its time is over, and marks its blocks, so that it is known then
// which were used.
func (l *Ledger) goOnLocked(w *wish) {
	for i := range w.chains {
		l.c.Memory.MarkUnused(w.space, w.chains[i].Group, w.chains[i].Hashes, w.action.Kind == Drop)
	}
	l.enterLocked(w)
	heap.Push(&l.mu.wishes, w)
}

// rankLocked retains or demotes blocks. A session's wish to retain replaces its earlier one.
func (l *Ledger) rankLocked(w *wish) {
	r := w.receipt
	if !l.c.Ranks {
		r.State, r.Reason = Rejected, "the policy of eviction ranks blocks by their last use alone"
		return
	}
	priority := uint8(0)
	if w.action.Kind == Retain {
		if priority = w.action.Priority; priority > 50 {
			if l.clipLocked(w); r.State == Rejected {
				return
			}
		}
	}
	for i := range w.chains {
		c := &w.chains[i]
		l.c.Memory.Advise(w.space, c.Group, c.Hashes, pool.Advice{Priority: priority}, w.action.For)
	}
	l.goOnLocked(w)
}

// clipLocked accounts what a wish retains, stored or not, and shortens its chains to the session's
// share.
func (l *Ledger) clipLocked(w *wish) {
	if w.session.name != "" {
		for _, old := range slices.Clone(l.account(w).retains) {
			if old.part != w.part || old.part == 0 {
				heap.Remove(&l.mu.wishes, old.index)
				l.leaveLocked(old)
				l.concludeLocked(old)
			}
		}
	}
	r := w.receipt
	each := r.Bytes / int64(r.Blocks)
	allowed := min(l.c.Capacity/sessionPart-l.account(w).retained, l.c.Capacity/allPart-l.mu.retained)
	if all := each * int64(w.blocks); all > allowed {
		part := float64(max(0, allowed)) / float64(all)
		w.blocks = 0
		for i := range w.chains {
			c := &w.chains[i]
			c.Hashes = c.Hashes.Slice(0, int(float64(c.Hashes.N)*part))
			w.blocks += c.Hashes.N
		}
		r.State, r.Reason = Clipped, fmt.Sprintf(
			"a session may retain %d bytes, all together %d", l.c.Capacity/sessionPart, l.c.Capacity/allPart)
		if r.Blocks, r.Bytes = l.stored(w); r.Blocks == 0 {
			r.State = Rejected
			return
		}
	}
	w.retained = each * int64(w.blocks)
}

func (l *Ledger) pinLocked(w *wish) {
	r, pinned, bytes := w.receipt, 0, int64(0)
	for i := range w.chains {
		n, b := l.mu.pins.add(l.c.Memory, l.c.PinBudget, w, &w.chains[i])
		pinned, bytes = pinned+n, bytes+b
	}
	switch {
	case pinned == 0:
		r.State, r.Reason = Rejected, fmt.Sprintf("%d bytes are pinned, allowed is %d", l.mu.pins.bytes, l.c.PinBudget)
	case pinned < r.Blocks:
		r.State, r.Reason = Clipped, fmt.Sprintf("%d bytes may be pinned", l.c.PinBudget)
	}
	if r.Blocks, r.Bytes = pinned, bytes; pinned > 0 {
		l.goOnLocked(w)
	}
}

func (l *Ledger) dropLocked(w *wish) {
	r := w.receipt
	if w.action.For > 0 {
		l.goOnLocked(w)
		r.State, r.Reason = Deferred, "blocks that are used until then stay"
		return
	}
	stored := r.Blocks
	for i := range w.chains {
		l.c.Memory.MarkUnused(w.space, w.chains[i].Group, w.chains[i].Hashes, true)
	}
	l.drop(w)
	if r.Over = true; r.Blocks < stored {
		r.State, r.Reason = Clipped, fmt.Sprintf("%d blocks stay that others follow or are in use", stored-r.Blocks)
	}
}

// drop drops the blocks of a wish that were not used; mu is held.
func (l *Ledger) drop(w *wish) {
	r := w.receipt
	each := r.Bytes / int64(max(1, r.Blocks))
	r.Blocks = 0
	for i := range w.chains {
		r.Blocks += l.c.Memory.DropUnused(w.space, w.chains[i].Group, w.chains[i].Hashes)
	}
	r.Bytes = each * int64(r.Blocks)
	l.mu.count.Dropped += uint64(r.Blocks)
}

func (l *Ledger) prefetchLocked(w *wish, stored int) {
	r := w.receipt
	if l.c.Raise == nil {
		r.State, r.Reason = Rejected, "there is no tier"
		return
	}
	w.before = stored
	select {
	case l.queue <- w:
		r.State, r.Reason = Deferred, "another receipt follows"
		l.enterLocked(w)
	default:
		r.State, r.Reason = Rejected, fmt.Sprintf("%d prefetches wait, allowed is %d", MaxWaiting, MaxWaiting)
	}
}

// prefetch carries out prefetches, one at a time, until ctx ends: they take no more of the tiers'
// rate than one fetch of another agent does.
func (l *Ledger) prefetch(ctx context.Context) {
	for {
		select {
		case w := <-l.queue:
			for i := range w.chains {
				l.c.Raise(ctx, w.space, w.chains[i].Group, w.chains[i].Hashes)
			}
			l.arrived(w, "no tier has the blocks")
		case <-ctx.Done():
			return
		}
	}
}

func (l *Ledger) fetchLocked(w *wish, stored int) {
	r := w.receipt
	if l.c.Fetch == nil {
		r.State, r.Reason = Rejected, "this agent serves no others and asks none"
		return
	}
	name := "hint/" + w.action.ID
	if w.action.ID == "" {
		name = fmt.Sprintf("hint/%d", r.At.UnixNano())
	}
	ended, err := l.c.Fetch(w.space, name, w.action.Peer, w.chains)
	if err != nil {
		r.State, r.Reason = Rejected, err.Error()
		return
	}
	w.before = stored
	r.State, r.Reason = Deferred, "another receipt follows"
	l.enterLocked(w)
	l.running.Go(func() {
		select {
		case <-ended:
			l.arrived(w, "the other agent sent none of the blocks")
		case <-l.ending:
		}
	})
}

// arrived ends a prefetch or a fetch: what it brought is marked, so that it is known later whether
// it was used.
func (l *Ledger) arrived(w *wish, none string) {
	blocks, bytes := l.stored(w)
	l.mu.Lock()
	r := w.receipt
	l.leaveLocked(w)
	r.Blocks, r.Bytes = blocks-min(blocks, w.before), 0
	if blocks > 0 {
		r.Bytes = bytes / int64(blocks) * int64(r.Blocks)
	}
	r.State, r.Reason = Accepted, ""
	switch {
	case blocks == w.blocks:
	case r.Blocks == 0:
		r.State, r.Reason = Missing, none
	default:
		r.State, r.Reason = Clipped, fmt.Sprintf("%d of %d blocks are in memory", blocks, w.blocks)
	}
	l.mu.count.note(r.State)
	if r.Blocks > 0 && !l.mu.closed {
		w.at = l.c.Now().Add(w.action.For)
		l.goOnLocked(w)
	}
	later, receipt := w.later, *r
	l.mu.Unlock()
	if later != nil {
		later(receipt)
	}
}
