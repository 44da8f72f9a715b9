package tier

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Collecting what is under names that nobody uses any more: those of earlier epochs, and of private
// spaces whose engines are gone. One store at a time, at CollectRate keys a second, in small calls,
// between which look-ups and fetches go first. What is to be done is in the kept state, and a look
// that was cut off is begun again: what it deleted it does not find any more. Each name is looked
// for twice, CollectAfter apart, so that what a node wrote that heard of the reset late goes as
// well.
const (
	collectLooks   = 2
	collectNames   = 64               // names looked for at once
	collectAtOnce  = 16               // keys of one Delete
	collectRetry   = time.Minute      // until a store that failed is tried again
	collectSilence = time.Minute      // after which a list that says nothing is given up
	collectMarks   = 10 * time.Second // between two times that use marks are read during a look
	collectYield   = 100              // times that 10 ms are left to look-ups and fetches between two calls
)

var errCollectSilent = errors.New("its list says nothing any more")

// collectAlways is the life of the collector.
func (p *Pool) collectAlways(ctx context.Context) {
	again := make(map[*lane]time.Time) // failed: not before
	for {
		next := p.now().Add(p.o.CollectAfter)
		for _, l := range p.lanes {
			at := p.collectFrom(ctx, l, again)
			if at.Before(next) {
				next = at
			}
		}
		if !pauseFor(ctx, min(max(next.Sub(p.now()), MinEpochEvery), p.o.EpochEvery)) {
			return
		}
	}
}

// collectFrom looks for all names that are due in a tier, and returns when the next one is.
func (p *Pool) collectFrom(ctx context.Context, l *lane, again map[*lane]time.Time) time.Time {
	for ctx.Err() == nil {
		now := p.now()
		names, next := p.spaces.due(l, now)
		if len(names) == 0 {
			return next
		}
		if !l.up() || now.Before(again[l]) {
			return now.Add(collectRetry)
		}
		names, err := l.unmarked(ctx, names)
		if err == nil && len(names) > 0 {
			err = l.collect(ctx, names)
		}
		if err != nil {
			if ctx.Err() == nil {
				l.count.collectFails.Add(1)
				l.say("names that nobody uses are not collected: tried again", err)
			}
			again[l] = now.Add(collectRetry)
			return again[l]
		}
		p.spaces.looked(l, names, p.now())
		p.flush()
	}
	return p.now()
}

// due is the names that are to be looked for in a tier now, and when the next one is. That of use
// marks is among them when the old ones are to be collected.
func (s *spaces) due(l *lane, now time.Time) (names []pool.Fingerprint, next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next = now.Add(s.after)
	if at, ok := s.sweepAt(l); ok && !at.After(now) {
		names = append(names, pool.UseMarks)
	} else if ok && at.Before(next) {
		next = at
	}
	for name, left := range s.kept.Leftovers {
		done := left.Tiers[l.Name]
		if !l.waitsFor(&left) {
			continue
		}
		switch at := time.UnixMilli(max(left.Due, done.Next)); {
		case at.After(now):
			if at.Before(next) {
				next = at
			}
		case len(names) < collectNames:
			names = append(names, name)
		}
	}
	return names, next
}

// looked notes that names were looked for in a tier. Those for which all tiers are done with are
// forgotten, and private spaces with them.
func (s *spaces) looked(l *lane, names []pool.Fingerprint, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if name == pool.UseMarks {
			s.kept.Swept[l.Name], s.dirty = now.Unix(), true
		}
		left, still := s.kept.Leftovers[name]
		if !still {
			continue
		}
		done := left.Tiers[l.Name]
		done.N, done.Next = done.N+1, now.Add(s.after).UnixMilli()
		if !l.lists() {
			done.N = collectLooks
		}
		left.Tiers[l.Name] = done
		s.dirty = true
		if !l.p.waits(&left) {
			s.collectedLocked(name, left)
		}
	}
}

// collectedLocked forgets a name, and a space that was retired with the last of its names, unless
// another node uses it.
func (s *spaces) collectedLocked(name pool.Fingerprint, left catalog.Leftover) {
	delete(s.kept.Leftovers, name)
	if !s.retired[left.Space] {
		return
	}
	for _, other := range s.kept.Leftovers {
		if other.Space == left.Space {
			return // the epoch is needed until the last name is collected
		}
	}
	if e := s.kept.Spaces[left.Space]; e.Named && e.Seen != 0 {
		return
	}
	delete(s.kept.Spaces, left.Space)
	if !s.openLocked(left.Space) { // else it stays without tiers until an engine comes, or it is closed
		delete(s.retired, left.Space)
	}
}

// concerns reports whether a name is looked for in a tier.
func (l *lane) concerns(left *catalog.Leftover) bool { return l.Local || !left.Local }

// waitsFor reports whether a tier has still to be looked at for a name.
func (l *lane) waitsFor(left *catalog.Leftover) bool {
	return l.concerns(left) && left.Tiers[l.Name].N < collectLooks
}

// waits reports whether some tier has still to be looked at for a name.
func (p *Pool) waits(left *catalog.Leftover) bool {
	return slices.ContainsFunc(p.lanes, func(l *lane) bool { return l.waitsFor(left) })
}

// lists reports whether a tier can say what it holds.
func (l *lane) lists() bool {
	_, some := l.Store.(pool.SpaceLister)
	_, all := l.Store.(pool.Lister)
	return some || all
}

// collecting is one look of a tier for some names.
type collecting struct {
	l     *lane
	names []pool.Fingerprint
	marks time.Time   // when use marks were read last
	alive *time.Timer // ends the look when it fires
	keys  []pool.Key
	bytes []int64
	debt  time.Duration // of the rate
}

// collect deletes what a tier holds under names that nobody uses, as far as it can say what it
// holds, and the markers of their epochs that no node needs any more.
func (l *lane) collect(ctx context.Context, names []pool.Fingerprint) error {
	if l.lists() {
		list, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		c := &collecting{l: l, names: names, marks: l.p.now()}
		c.alive = time.AfterFunc(collectSilence, func() { cancel(errCollectSilent) })
		defer c.alive.Stop()
		if err := c.list(list, names); err != nil {
			return errors.Join(err, context.Cause(list))
		}
		if err := c.delete(list); err != nil {
			return errors.Join(err, context.Cause(list))
		}
	}
	if l.Local {
		return nil
	}
	keys := l.p.spaces.staleMarkers(l, names)
	for len(keys) > 0 {
		n := min(len(keys), followKeys)
		within, stop := context.WithTimeout(ctx, l.PutWithin)
		err := l.Store.Delete(within, keys[:n])
		stop()
		if err != nil {
			return err
		}
		keys = keys[n:]
	}
	return nil
}

// staleMarkers is the markers that the last look for names takes along. Which of them others need
// cannot be told of a space that is not private and whose epoch is not kept: none is given.
func (s *spaces) staleMarkers(l *lane, names []pool.Fingerprint) (keys []pool.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		left, still := s.kept.Leftovers[name]
		if !still || l.lists() && left.Tiers[l.Name].N+1 < collectLooks {
			continue
		}
		e, known := s.kept.Spaces[left.Space]
		if !known && !left.Private || left.Unused && !l.lists() {
			continue
		}
		needed := catalog.Below(e.Epoch)
		gone := []uint64{left.Epoch}
		if left.Private || left.Unused && left.Epoch == e.Epoch {
			needed, gone = nil, catalog.Below(left.Epoch)
		}
		for _, n := range gone {
			if n > 0 && !slices.Contains(needed, n) {
				keys = append(keys, catalog.MarkerKey(left.Space, n))
			}
		}
	}
	return keys
}

func (c *collecting) list(ctx context.Context, names []pool.Fingerprint) error {
	found := func(k pool.Key, bytes int64) {
		c.keys, c.bytes = append(c.keys, k), append(c.bytes, bytes)
	}
	if some, can := c.l.Store.(pool.SpaceLister); can {
		return some.ListSpaces(ctx, names, func(n int) error { return c.looked(ctx, n) }, found)
	}
	var failed error
	err := c.l.Store.(pool.Lister).List(ctx, func(k pool.Key, bytes int64) bool {
		if slices.Contains(names, k.Space) {
			found(k, bytes)
		}
		failed = c.looked(ctx, 1)
		return failed == nil
	})
	return errors.Join(err, failed)
}

// looked deletes what was found since the last call, and pauses as the rate wants. Now and then it
// reads the use marks again: what another node uses by now is not left over.
func (c *collecting) looked(ctx context.Context, n int) error {
	c.alive.Stop()
	defer c.alive.Reset(collectSilence)
	if now := c.l.p.now(); now.Sub(c.marks) >= collectMarks {
		c.marks = now
		if _, err := c.l.unmarked(ctx, c.names); err != nil {
			return err
		}
	}
	if err := c.delete(ctx); err != nil {
		return err
	}
	return c.pace(ctx, n)
}

func (c *collecting) delete(ctx context.Context) error {
	for len(c.keys) > 0 {
		n := min(len(c.keys), collectAtOnce)
		keys, shards, bytes := c.l.p.spaces.stillLeft(c.l, c.keys[:n], c.bytes[:n])
		c.yield(ctx)
		within, stop := context.WithTimeout(ctx, c.l.PutWithin)
		err := c.l.Store.Delete(within, keys)
		stop()
		if err != nil {
			return err
		}
		for i := range keys {
			life := life{stored: keys[i].Space}
			print := life.print(keys[i].Group, keys[i].Hash.Bytes[:keys[i].Hash.Len])
			c.l.written.forget(print)
			if !c.l.Local {
				c.l.known.forget(print)
			}
		}
		c.l.count.collected.Add(uint64(shards))
		c.l.count.collectedBytes.Add(uint64(bytes))
		c.keys, c.bytes = c.keys[n:], c.bytes[n:]
		if err := c.pace(ctx, n); err != nil {
			return err
		}
	}
	c.keys, c.bytes = c.keys[:0], c.bytes[:0]
	return nil
}

// stillLeft is the keys whose names nobody uses even now, which are counted, and use marks that no
// node reads.
func (s *spaces) stillLeft(l *lane, keys []pool.Key, sizes []int64) (still []pool.Key, shards int, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := l.p.now()
	for i := range keys {
		left, noted := s.kept.Leftovers[keys[i].Space]
		switch {
		case noted && l.waitsFor(&left):
			shards, bytes = shards+1, bytes+sizes[i]
		case keys[i].Space != pool.UseMarks || !catalog.StaleMark(&keys[i], now):
			continue
		}
		still = append(still, keys[i])
	}
	return still, shards, bytes
}

// pace pauses so long that no more than CollectRate keys a second are looked at or deleted.
func (c *collecting) pace(ctx context.Context, n int) error {
	c.debt += time.Duration(n) * time.Second / time.Duration(c.l.p.o.CollectRate)
	if c.debt >= 5*time.Millisecond {
		pauseFor(ctx, c.debt)
		c.debt = 0
	}
	return ctx.Err()
}

// yield lets what waits for the store go first, for a second at most.
func (c *collecting) yield(ctx context.Context) {
	for range collectYield {
		c.l.p.mu.Lock()
		waits := c.l.fetches.n > 0
		c.l.p.mu.Unlock()
		if !waits && len(c.l.questions) == 0 || !pauseFor(ctx, 10*time.Millisecond) {
			return
		}
	}
}

// report says how far collecting is.
func (s *spaces) report(r *pool.TierReport, lanes []*lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Adopted, r.Again, r.Names, r.Lost = s.adopted, s.again, len(s.kept.Leftovers), s.lost
	r.Unused, r.UsedElsewhere = s.unused, s.elsewhere
	for i, l := range lanes {
		if !l.lists() {
			continue
		}
		for _, left := range s.kept.Leftovers {
			if l.waitsFor(&left) {
				r.Tiers[i].Collecting++
			}
		}
	}
}
