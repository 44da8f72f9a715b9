package tier

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Collection deletes what tiers hold under orphans: names of earlier epochs, and of spaces that are
// no longer used. It scans one store at a time, at CollectRate keys a second, in small calls that
// yield to look-ups and fetches. The catalog holds what is still to be scanned; an interrupted scan
// starts again. Each name is scanned for twice, CollectAfter apart, to find also what a node wrote
// before it learned of the reset.
const (
	collectScans   = 2                // scans of a tier for each name
	collectNames   = 64               // names of one scan
	collectAtOnce  = 16               // keys of one Delete
	collectRetry   = time.Minute      // after a store failed
	collectSilence = time.Minute      // after which a listing without progress is cancelled
	collectMarks   = 10 * time.Second // between two reads of use marks during a scan
	collectYield   = 100              // at most so many times 10 ms between two calls, for look-ups and fetches
)

var errCollectSilent = errors.New("its listing makes no progress")

// collectLoop runs the collector until ctx ends.
func (p *Pool) collectLoop(ctx context.Context) {
	again := make(map[*level]time.Time) // after a failure: when to try again
	for {
		next := p.now().Add(p.o.CollectAfter)
		for _, l := range p.levels {
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

// collectFrom scans a tier for all names whose time has come, and returns when the next one's
// comes.
func (p *Pool) collectFrom(ctx context.Context, l *level, again map[*level]time.Time) time.Time {
	for ctx.Err() == nil {
		now := p.now()
		names, next := p.spaces.namesToScan(l, now)
		if len(names) == 0 {
			return next
		}
		if !l.up() || now.Before(again[l]) {
			return now.Add(collectRetry)
		}
		names, err := l.withoutUseMarks(ctx, names)
		if err == nil && len(names) > 0 {
			err = l.collect(ctx, names)
		}
		if err != nil {
			if ctx.Err() == nil {
				l.count.collectFails.Add(1)
				l.logLimited("collecting unused names failed, will retry", err)
			}
			again[l] = now.Add(collectRetry)
			return again[l]
		}
		p.spaces.scanned(l, names, p.now())
		p.flush()
	}
	return p.now()
}

// namesToScan returns the names to scan a tier for now, and when the next one's time comes.
// pool.UseMarks is among them if old use marks are to be collected.
func (s *spaces) namesToScan(l *level, now time.Time) (names []pool.Fingerprint, next time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next = now.Add(s.after)
	if at, ok := s.nextMarkSweep(l); ok && !at.After(now) {
		names = append(names, pool.UseMarks)
	} else if ok && at.Before(next) {
		next = at
	}
	for name, left := range s.catalog.Orphans {
		done := left.Tiers[l.Name]
		if !l.needsScan(&left) {
			continue
		}
		switch at := time.UnixMilli(max(left.NotBefore, done.Next)); {
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

// scanned records that a tier was scanned for names. Names that all tiers are done with leave the
// catalog.
func (s *spaces) scanned(l *level, names []pool.Fingerprint, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if name == pool.UseMarks {
			s.catalog.Swept[l.Name], s.dirty = now.Unix(), true
		}
		left, still := s.catalog.Orphans[name]
		if !still {
			continue
		}
		done := left.Tiers[l.Name]
		done.N, done.Next = done.N+1, now.Add(s.after).UnixMilli()
		if !l.canList() {
			done.N = collectScans
		}
		left.Tiers[l.Name] = done
		s.dirty = true
		if !l.p.needsScan(&left) {
			s.collectedLocked(name, left)
		}
	}
}

// collectedLocked removes a name from the catalog, and its space if that was retired, has no other
// orphans and is not used by another node.
func (s *spaces) collectedLocked(name pool.Fingerprint, left catalog.Orphan) {
	delete(s.catalog.Orphans, name)
	if !s.retired[left.Space] {
		return
	}
	for _, other := range s.catalog.Orphans {
		if other.Space == left.Space {
			return // the epoch is needed until the last name is collected
		}
	}
	if e := s.catalog.Spaces[left.Space]; e.Named && e.Seen != 0 {
		return
	}
	delete(s.catalog.Spaces, left.Space)
	if !s.openLocked(left.Space) { // an open one stays retired until an engine uses it or it is closed
		delete(s.retired, left.Space)
	}
}

// covers reports whether a tier is scanned for a name at all.
func (l *level) covers(left *catalog.Orphan) bool { return l.Local || !left.Local }

// needsScan reports whether a tier is still to be scanned for a name.
func (l *level) needsScan(left *catalog.Orphan) bool {
	return l.covers(left) && left.Tiers[l.Name].N < collectScans
}

// needsScan reports whether any tier is still to be scanned for a name.
func (p *Pool) needsScan(left *catalog.Orphan) bool {
	return slices.ContainsFunc(p.levels, func(l *level) bool { return l.needsScan(left) })
}

// canList reports whether a tier can list what it holds.
func (l *level) canList() bool {
	_, some := l.Store.(pool.SpaceLister)
	_, all := l.Store.(pool.Lister)
	return some || all
}

// scan is one scan of a tier for some names.
type scan struct {
	l     *level
	names []pool.Fingerprint
	marks time.Time   // when use marks were last read
	alive *time.Timer // cancels the scan when it fires
	keys  []pool.Key
	bytes []int64
	debt  time.Duration // pause owed to CollectRate
}

// collect deletes what a tier holds under orphans, if it can list its contents, and the epoch
// markers that no node needs any more.
func (l *level) collect(ctx context.Context, names []pool.Fingerprint) error {
	if l.canList() {
		list, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		c := &scan{l: l, names: names, marks: l.p.now()}
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

// staleMarkers returns the markers to delete with the last scan for names. It returns none for a
// space that is neither private nor in the catalog: other nodes may need them.
func (s *spaces) staleMarkers(l *level, names []pool.Fingerprint) (keys []pool.Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		left, still := s.catalog.Orphans[name]
		if !still || l.canList() && left.Tiers[l.Name].N+1 < collectScans {
			continue
		}
		e, ok := s.catalog.Spaces[left.Space]
		if !ok && !left.Private || left.Unused && !l.canList() {
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

func (c *scan) list(ctx context.Context, names []pool.Fingerprint) error {
	found := func(k pool.Key, bytes int64) {
		c.keys, c.bytes = append(c.keys, k), append(c.bytes, bytes)
	}
	if some, can := c.l.Store.(pool.SpaceLister); can {
		return some.ListSpaces(ctx, names, func(n int) error { return c.progress(ctx, n) }, found)
	}
	var failed error
	err := c.l.Store.(pool.Lister).List(ctx, func(k pool.Key, bytes int64) bool {
		if slices.Contains(names, k.Space) {
			found(k, bytes)
		}
		failed = c.progress(ctx, 1)
		return failed == nil
	})
	return errors.Join(err, failed)
}

// progress deletes what was found since the last call and paces the scan. It also reads the use
// marks again from time to time, and spares what another node uses by then.
func (c *scan) progress(ctx context.Context, n int) error {
	c.alive.Stop()
	defer c.alive.Reset(collectSilence)
	if now := c.l.p.now(); now.Sub(c.marks) >= collectMarks {
		c.marks = now
		if _, err := c.l.withoutUseMarks(ctx, c.names); err != nil {
			return err
		}
	}
	if err := c.delete(ctx); err != nil {
		return err
	}
	return c.pace(ctx, n)
}

func (c *scan) delete(ctx context.Context) error {
	for len(c.keys) > 0 {
		n := min(len(c.keys), collectAtOnce)
		keys, shards, bytes := c.l.p.spaces.stillOrphaned(c.l, c.keys[:n], c.bytes[:n])
		c.yield(ctx)
		within, stop := context.WithTimeout(ctx, c.l.PutWithin)
		err := c.l.Store.Delete(within, keys)
		stop()
		if err != nil {
			return err
		}
		for i := range keys {
			era := era{stored: keys[i].Space}
			digest := era.digest(keys[i].Group, keys[i].Hash.Bytes[:keys[i].Hash.Len])
			c.l.written.forget(digest)
			if !c.l.Local {
				c.l.exists.forget(digest)
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

// stillOrphaned returns the keys to delete: those whose names are still orphans, which it counts,
// and use marks that no node reads any more.
func (s *spaces) stillOrphaned(l *level, keys []pool.Key, sizes []int64) (still []pool.Key, shards int, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := l.p.now()
	for i := range keys {
		left, noted := s.catalog.Orphans[keys[i].Space]
		switch {
		case noted && l.needsScan(&left):
			shards, bytes = shards+1, bytes+sizes[i]
		case keys[i].Space != pool.UseMarks || !catalog.StaleMark(&keys[i], now):
			continue
		}
		still = append(still, keys[i])
	}
	return still, shards, bytes
}

// pace pauses so that at most CollectRate keys a second are examined or deleted.
func (c *scan) pace(ctx context.Context, n int) error {
	c.debt += time.Duration(n) * time.Second / time.Duration(c.l.p.o.CollectRate)
	if c.debt >= 5*time.Millisecond {
		pauseFor(ctx, c.debt)
		c.debt = 0
	}
	return ctx.Err()
}

// yield lets queued look-ups and fetches of the store go first, for at most a second.
func (c *scan) yield(ctx context.Context) {
	for range collectYield {
		c.l.p.mu.Lock()
		waits := c.l.fetches.n > 0
		c.l.p.mu.Unlock()
		if !waits && len(c.l.questions) == 0 || !pauseFor(ctx, 10*time.Millisecond) {
			return
		}
	}
}

// report fills in the state of collection.
func (s *spaces) report(r *pool.TierReport, levels []*level) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.Adopted, r.Again, r.Names, r.Lost = s.adopted, s.again, len(s.catalog.Orphans), s.lost
	r.Unused, r.UsedElsewhere = s.unused, s.elsewhere
	for i, l := range levels {
		if !l.canList() {
			continue
		}
		for _, left := range s.catalog.Orphans {
			if l.needsScan(&left) {
				r.Tiers[i].Collecting++
			}
		}
	}
}
