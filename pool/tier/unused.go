package tier

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Collection of named generations that no node uses any more.
//
// A node records when its own engines last used each named space. It learns what other nodes use
// from use marks: values in a reserved space of each shared store, whose key is made of the
// fingerprint and the number of a period. A node puts the mark of the current period while it uses
// the space. A space that this node has not used for CollectUnused is retired: its names become
// orphans. Local tiers are scanned for them as for any other. A shared tier is scanned only if it
// had no mark for the periods that span CollectUnused, twice, at least CollectAfter apart. The
// marks are read again before and during each scan; a mark of another node ends the collection
// there.

// spacesToMark returns the spaces whose marks a level's store needs: those with an engine, and
// those that were used in this period.
func (s *spaces) spacesToMark(span time.Duration, now int64) (all []pool.Fingerprint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for fp := range s.active {
		all = append(all, fp)
	}
	own := catalog.OwnLength(span)
	for fp, e := range s.catalog.Spaces {
		if e.Named && !s.active[fp] && span > 0 && catalog.PeriodAt(e.Used, own) == catalog.PeriodAt(now, own) {
			all = append(all, fp)
		}
	}
	return all
}

// markRound puts the marks of the current periods that a store may lack, at most followSpaces of
// them.
func (l *level) markRound(ctx context.Context) error {
	if !l.canList() {
		return nil // nothing is collected there
	}
	span, now := l.p.o.CollectUnused, l.p.now()
	was, is := l.following.marked, make(map[pool.Key]time.Time)
	l.following.marked = is
	var keys []pool.Key
	for _, fp := range l.p.spaces.spacesToMark(span, now.Unix()) {
		for _, key := range catalog.UseKeys(fp, span, now.Unix()) {
			if until := was[key]; now.Before(until) {
				is[key] = until
			} else if len(keys) < followSpaces {
				keys = append(keys, key)
			}
		}
	}
	status, err := l.askMarkers(ctx, keys)
	if err != nil || len(keys) == 0 {
		return err
	}
	var missing []pool.Key
	for i := range keys {
		if status[i] != pool.OK {
			missing = append(missing, keys[i])
		}
	}
	for some := range slices.Chunk(missing, followKeys) {
		if err := l.putMarkerKeys(ctx, some); err != nil {
			return err
		}
	}
	for _, key := range keys {
		is[key] = now.Add(followFull * l.p.o.EpochEvery)
	}
	l.p.spaces.marksPut(l, now)
	return nil
}

// marksPut records that a store has use marks, which are to be collected later.
func (s *spaces) marksPut(l *level, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.catalog.Swept[l.Name]; !ok {
		s.catalog.Swept[l.Name] = now.Unix()
		s.dirty = true
	}
}

// nextMarkSweep returns when the old use marks of a store are to be collected next; ok is false if
// this node never put one there.
func (s *spaces) nextMarkSweep(l *level) (at time.Time, ok bool) {
	last, ok := s.catalog.Swept[l.Name]
	ok = ok && !l.Local && l.canList()
	return time.Unix(last, 0).Add(catalog.Period(catalog.OwnLength(l.p.o.CollectUnused))), ok
}

// inUseLocked records that a named space has an engine of this node. Its names are no orphans then.
func (p *Pool) inUseLocked(fp pool.Fingerprint) {
	p.spaces.active[fp] = true
	p.spaces.restoreLocked(fp)
	p.follow()
}

// restoreLocked removes the orphans of a named space that was retired.
func (s *spaces) restoreLocked(fp pool.Fingerprint) {
	for name, left := range s.catalog.Orphans {
		if left.Unused && left.Space == fp {
			delete(s.catalog.Orphans, name)
			s.dirty = true
			s.changedNow()
		}
	}
}

// retireUnused records which named spaces are in use, once a period, and retires those that this
// node has not used for CollectUnused. It fills at most half of the catalog's orphans.
func (p *Pool) retireUnused() {
	s, span, now := &p.spaces, p.o.CollectUnused, p.now()
	if span == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	own := catalog.OwnLength(span)
	for fp := range s.active {
		if e, ok := s.catalog.Spaces[fp]; ok && catalog.PeriodAt(e.Used, own) != catalog.PeriodAt(now.Unix(), own) {
			e.Used = now.Unix()
			s.catalog.Spaces[fp] = e
			s.dirty = true
		}
	}
	if now.Before(s.opened.Add(s.after)) {
		return // engines of the previous process have as long to return
	}
	left := make(map[pool.Fingerprint]bool)
	for _, one := range s.catalog.Orphans {
		if one.Unused {
			left[one.Space] = true
		}
	}
	first := catalog.PeriodAt(now.Unix()-int64(span/time.Second), own)
	for fp, e := range s.catalog.Spaces {
		if !e.Named || s.active[fp] || left[fp] || catalog.PeriodAt(max(e.Used, e.Seen), own) >= first {
			continue
		}
		if len(s.catalog.Orphans) >= catalog.MaxOrphans/2 {
			return
		}
		s.retireLocked(fp, e, now)
	}
}

// retireLocked makes the names of a space orphans: that of its epoch, those before it, and that of
// epoch 0, which nodes use that missed every reset.
func (s *spaces) retireLocked(fp pool.Fingerprint, e catalog.Space, now time.Time) {
	s.retired[fp] = true
	s.unused++
	for _, sp := range *s.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			sp.now.Store(&era{off: true}) // what memory still has of it is not written to tiers
		}
	}
	e.Seen = 0
	s.catalog.Spaces[fp] = e
	epochs := []uint64{0}
	for epoch := e.Epoch - min(e.Epoch, maxOldNames) + 1; epoch <= e.Epoch; epoch++ {
		epochs = append(epochs, epoch)
	}
	for _, epoch := range epochs {
		name := catalog.StoredName(fp, epoch)
		if _, noted := s.catalog.Orphans[name]; !noted {
			s.addOrphanLocked(name, catalog.Orphan{Space: fp, Epoch: epoch, Unused: true, NotBefore: now.UnixMilli()})
		}
	}
	s.changedNow()
}

var errMarksUnread = errors.New("use marks cannot be read")

// withoutUseMarks returns the names that a tier may be scanned for: of unused spaces only those
// whose marks were missing before too, long enough ago for other nodes to put them back.
func (l *level) withoutUseMarks(ctx context.Context, names []pool.Fingerprint) ([]pool.Fingerprint, error) {
	if l.Local || !l.canList() {
		return names, nil
	}
	now := l.p.now()
	var keys []pool.Key
	var owner []pool.Fingerprint
	for _, fp := range l.p.spaces.unusedOf(names) {
		keys = append(keys, catalog.UnusedKeys(fp, l.p.o.CollectUnused, now.Unix())...)
		for len(owner) < len(keys) {
			owner = append(owner, fp)
		}
	}
	status, err := l.askMarkers(ctx, keys)
	if err != nil {
		return nil, err
	}
	used := make(map[pool.Fingerprint]bool)
	for i := range status {
		switch status[i] {
		case pool.Missing:
		case pool.Busy:
			return nil, errMarksUnread
		default:
			used[owner[i]] = true
		}
	}
	return l.p.spaces.dropUsed(l, names, used, now), nil
}

// unusedOf returns the spaces of those names that are orphans only because no node is believed to
// use them.
func (s *spaces) unusedOf(names []pool.Fingerprint) (all []pool.Fingerprint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if left, still := s.catalog.Orphans[name]; still && left.Unused && !slices.Contains(all, left.Space) {
			all = append(all, left.Space)
		}
	}
	return all
}

// dropUsed ends the collection of names that other nodes use in a tier, and returns the names that
// the tier may be scanned for now.
func (s *spaces) dropUsed(
	l *level, names []pool.Fingerprint, used map[pool.Fingerprint]bool, now time.Time,
) (free []pool.Fingerprint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	settle := max(s.after, 2*followFull*l.p.o.EpochEvery)
	for _, name := range names {
		left, still := s.catalog.Orphans[name]
		if !still || !left.Unused {
			free = append(free, name)
			continue
		}
		done := left.Tiers[l.Name]
		switch {
		case used[left.Space]:
			done.N = collectScans
			s.usedElsewhere(left.Space, now)
		case done.Clear == 0:
			done.Clear, done.Next = now.UnixMilli(), now.Add(settle).UnixMilli()
		default:
			free = append(free, name)
			continue
		}
		left.Tiers[l.Name] = done
		s.dirty = true
		if !l.p.needsScan(&left) {
			s.collectedLocked(name, left)
		}
	}
	return free
}

// usedElsewhere records that another node was found to use a space, which delays its next
// retirement.
func (s *spaces) usedElsewhere(fp pool.Fingerprint, now time.Time) {
	e, ok := s.catalog.Spaces[fp]
	if !ok {
		return
	}
	if e.Seen == 0 {
		s.elsewhere++
	}
	e.Seen = now.Unix()
	s.catalog.Spaces[fp] = e
}
