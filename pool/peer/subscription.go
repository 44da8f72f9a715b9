package peer

import (
	"context"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// subscription announces the blocks of one fetch as they are stored. Its goroutine is woken by the
// transfer's source, and never polls.
type subscription struct {
	subscribe
	id     uint32
	space  pool.SpaceID
	cancel chan struct{} // closed when the client gives up; guarded by served.mu
	left   int           // blocks not announced
	absent [][]bool      // by group: not announced
}

// subscribe starts a subscription, which gives back what it holds when it ends. It ends at once if
// there are too many: then entered is false.
func (v *served) subscribe(id uint32, m *subscribe, held int64) (entered bool, err error) {
	s, _, ok := v.server.cfg.Resolve(m.space)
	if !ok {
		return false, v.endSubscription(id, EndNoSpace, 0)
	}
	sub := &subscription{subscribe: *m, id: id, space: s, cancel: make(chan struct{}), left: m.blocks()}
	for i := range m.groups {
		absent := make([]bool, m.groups[i].hashes.N)
		for k := range absent {
			absent[k] = true
		}
		sub.absent = append(sub.absent, absent)
	}
	if !v.enter(sub, held) {
		return false, v.refuse(id)
	}
	return true, nil
}

// refuse ends a subscription for which there is no room.
func (v *served) refuse(id uint32) error {
	v.mu.Lock()
	twice := v.subscriptions[id] != nil
	v.mu.Unlock()
	if twice {
		return malformed("SUBSCRIBE: id %d is in use", id)
	}
	return v.endSubscription(id, EndRefused, 0)
}

// enter registers a subscription and starts its goroutine, if there is room.
func (v *served) enter(sub *subscription, held int64) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || v.subscriptions[sub.id] != nil || len(v.subscriptions) >= v.server.cfg.Limits.Subscriptions {
		return false
	}
	v.subscriptions[sub.id] = sub
	v.server.count.add(func(c *ServerStats) { c.Subscriptions++ })
	v.watchers.Go(func() {
		defer func() {
			v.server.budget.give(v.host, held)
			v.server.count.add(func(c *ServerStats) { c.Subscriptions-- })
		}()
		v.watch(sub)
	})
	return true
}

// cancel ends a subscription. An unknown one has ended already.
func (v *served) cancel(id uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if sub := v.subscriptions[id]; sub != nil {
		delete(v.subscriptions, id)
		close(sub.cancel)
	}
}

// From an announce to the next one for a commit alone pass at least announcePause, and
// announceRests times what the first one took: each commit in the space wakes all its
// subscriptions, and one may have 65,536 blocks to look up.
const (
	announcePause = 2 * time.Millisecond
	announceRests = 9
)

// watch announces blocks until the subscription ends. A failed write ends the connection.
func (v *served) watch(sub *subscription) {
	bound := time.NewTimer(sub.wait)
	defer bound.Stop()
	seen, waited := false, sub.wait == 0
	var last time.Time        // the end of the last announce
	var took time.Duration    // by it
	var was Transfer          // then
	var raising chan struct{} // closed when nothing more comes up from lower tiers; then nil
	ctx, stop := context.WithCancel(context.Background())
	defer func() {
		if stop(); raising != nil {
			<-raising
		}
	}()
	for {
		var t Transfer
		var changed <-chan struct{}
		if sub.name != "" {
			t, changed = v.server.cfg.Transfers(sub.space, sub.name)
		}
		seen = seen || t.State == Open || t.State == Complete
		// The state is read before the index: what is complete by then is found.
		ending := waited || raising == nil && (t.State == Complete || t.State == Unknown && (seen || !sub.early))
		var paused <-chan time.Time
		start, first := time.Now(), last.IsZero()
		if rest := max(announcePause, announceRests*took) - start.Sub(last); rest > 0 && t == was && !ending {
			changed, paused = nil, time.After(rest)
		} else if err := v.announce(sub); err != nil {
			_ = v.raw.Close()
			return
		} else {
			last, was = time.Now(), t
			took = last.Sub(start)
			if first && sub.left > 0 && !waited && v.server.cfg.Raise != nil {
				raising = v.raise(ctx, sub)
			}
		}
		if end := sub.over(t, seen, waited); end != 0 && (raising == nil || waited || sub.left == 0) {
			v.drop(sub)
			if v.endSubscription(sub.id, end, t.Tokens) != nil {
				_ = v.raw.Close()
			}
			return
		}
		select {
		case <-changed:
		case <-paused:
		case <-raising:
			raising = nil
		case <-bound.C:
			waited = true
		case <-sub.cancel:
			v.server.count.add(func(c *ServerStats) { c.Ended[EndCancelled]++ })
			return
		case <-v.ended:
			v.server.count.add(func(c *ServerStats) { c.Ended[EndLost]++ })
			return
		}
	}
}

// raise brings blocks of a subscription that only lower tiers have into memory, where they are
// announced. The channel is closed when nothing more comes, or after ctx has ended.
func (v *served) raise(ctx context.Context, sub *subscription) chan struct{} {
	done := make(chan struct{})
	v.watchers.Go(func() {
		defer close(done)
		for i := range sub.groups {
			v.server.cfg.Raise(ctx, sub.space, sub.groups[i].group, sub.groups[i].hashes)
		}
	})
	return done
}

// over returns why nothing more will be announced; 0: more may come.
func (sub *subscription) over(t Transfer, seen, waited bool) End {
	switch {
	case sub.left == 0 || t.State == Complete:
		return EndComplete
	case t.State == Unknown && seen:
		return EndExpired
	case t.State == Unknown && !sub.early:
		return EndUnknown
	case waited:
		return EndWaited
	}
	return 0
}

// drop forgets a subscription that ends by itself.
func (v *served) drop(sub *subscription) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.subscriptions[sub.id] == sub {
		delete(v.subscriptions, sub.id)
	}
}

func (v *served) endSubscription(id uint32, e End, tokens uint32) error {
	v.server.count.add(func(c *ServerStats) { c.Ended[e]++ })
	return v.send(kindEnd, id, encodeEnd(e, tokens))
}

// announceStride is how many blocks one look-up of announce names.
const announceStride = 1024

// announce sends HAVE for the blocks that are stored and were not announced.
func (v *served) announce(sub *subscription) error {
	var runs []run
	base := 0
	for i := range sub.groups {
		n := sub.groups[i].hashes.N
		for from := 0; from < n; from += announceStride {
			runs = v.find(sub, i, base, from, runs)
		}
		base += n
	}
	for len(runs) > 0 {
		n := min(len(runs), maxRuns)
		if err := v.send(kindHave, sub.id, encodeHave(runs[:n])); err != nil {
			return err
		}
		runs = runs[n:]
	}
	return nil
}

// find appends the blocks of a stride of a group that are stored and were not announced. base is
// the number of the group's first block.
func (v *served) find(sub *subscription, group, base, from int, runs []run) []run {
	g := &sub.groups[group]
	to := min(from+announceStride, g.hashes.N)
	absent := sub.absent[group][from:to]
	if !slices.Contains(absent, true) {
		return runs
	}
	present := make([]bool, to-from)
	v.server.cfg.Index.Exists(sub.space, g.group, g.hashes.Slice(from, to), present)
	for k, is := range present {
		if !is || !absent[k] {
			continue
		}
		absent[k] = false
		sub.left--
		at := uint32(base + from + k)
		if n := len(runs); n > 0 && runs[n-1].first+runs[n-1].count == at {
			runs[n-1].count++
		} else {
			runs = append(runs, run{at, 1})
		}
	}
	return runs
}
