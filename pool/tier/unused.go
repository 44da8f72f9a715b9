package tier

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// Collecting named generations that no node uses any more.
//
// A node knows which named spaces its own engines use, and keeps when each was last used. What
// other nodes use it reads from use marks: values in a reserved space of each shared store, whose
// key is made of the fingerprint and the number of a period. A node puts the mark of the current
// period while it uses the space, and puts it back where a store lost it. A space that this node
// has not used for CollectUnused is retired: its names become leftovers. Local tiers are looked at
// as for every other leftover. A shared tier is looked at only if it had no mark for the periods
// that span CollectUnused, twice, at least CollectAfter apart; the marks are read again before each
// look and during it. A mark of another node ends the collection in that tier.

// marking reports the spaces whose marks a lane's store needs: those with an engine, and those that
// were used in this period.
func (s *spaces) marking(span time.Duration, now int64) (all []pool.Fingerprint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for fp := range s.active {
		all = append(all, fp)
	}
	own := catalog.OwnLength(span)
	for fp, e := range s.kept.Spaces {
		if e.Named && !s.active[fp] && span > 0 && catalog.PeriodAt(e.Used, own) == catalog.PeriodAt(now, own) {
			all = append(all, fp)
		}
	}
	return all
}

// markRound puts the marks of the current periods that a store is not known to have, at most
// followSpaces of them.
func (l *lane) markRound(ctx context.Context) error {
	if !l.lists() {
		return nil // nothing is collected there
	}
	span, now := l.p.o.CollectUnused, l.p.now()
	was, is := l.following.marked, make(map[pool.Key]time.Time)
	l.following.marked = is
	var keys []pool.Key
	for _, fp := range l.p.spaces.marking(span, now.Unix()) {
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

// marksPut notes that a store has use marks, which are to be collected one day.
func (s *spaces) marksPut(l *lane, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, known := s.kept.Swept[l.Name]; !known {
		s.kept.Swept[l.Name] = now.Unix()
		s.dirty = true
	}
}

// sweepAt is when the old use marks of a store are to be collected again; ok is false if this node
// never put one there.
func (s *spaces) sweepAt(l *lane) (at time.Time, ok bool) {
	last, ok := s.kept.Swept[l.Name]
	ok = ok && !l.Local && l.lists()
	return time.Unix(last, 0).Add(catalog.Period(catalog.OwnLength(l.p.o.CollectUnused))), ok
}

// inUseLocked notes that a named space has an engine of this node. What was left over of it is not.
func (p *Pool) inUseLocked(fp pool.Fingerprint) {
	p.spaces.active[fp] = true
	p.spaces.restoreLocked(fp)
	p.follow()
}

// restoreLocked takes a named space back that was retired.
func (s *spaces) restoreLocked(fp pool.Fingerprint) {
	for name, left := range s.kept.Leftovers {
		if left.Unused && left.Space == fp {
			delete(s.kept.Leftovers, name)
			s.dirty = true
			s.changedNow()
		}
	}
}

// retireUnused notes which named spaces are in use, once a period, and retires those that this node
// has not used for CollectUnused. There is room for them only up to half of MaxLeftovers: the others
// have their turn later.
func (p *Pool) retireUnused() {
	s, span, now := &p.spaces, p.o.CollectUnused, p.now()
	if span == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	own := catalog.OwnLength(span)
	for fp := range s.active {
		if e, known := s.kept.Spaces[fp]; known && catalog.PeriodAt(e.Used, own) != catalog.PeriodAt(now.Unix(), own) {
			e.Used = now.Unix()
			s.kept.Spaces[fp] = e
			s.dirty = true
		}
	}
	if now.Before(s.opened.Add(s.after)) {
		return // engines of the former life have as long to come back
	}
	left := make(map[pool.Fingerprint]bool)
	for _, one := range s.kept.Leftovers {
		if one.Unused {
			left[one.Space] = true
		}
	}
	first := catalog.PeriodAt(now.Unix()-int64(span/time.Second), own)
	for fp, e := range s.kept.Spaces {
		if !e.Named || s.active[fp] || left[fp] || catalog.PeriodAt(max(e.Used, e.Seen), own) >= first {
			continue
		}
		if len(s.kept.Leftovers) >= catalog.MaxLeftovers/2 {
			return
		}
		s.retireLocked(fp, e, now)
	}
}

// retireLocked makes leftovers of the names of a space: of its epoch, of those before it, and of
// epoch 0, under which nodes store that do not know of any reset.
func (s *spaces) retireLocked(fp pool.Fingerprint, e catalog.Space, now time.Time) {
	s.retired[fp] = true
	s.unused++
	for _, sp := range *s.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			sp.now.Store(&life{off: true}) // what memory still has of it is written nowhere
		}
	}
	e.Seen = 0
	s.kept.Spaces[fp] = e
	epochs := []uint64{0}
	for epoch := e.Epoch - min(e.Epoch, leftNames) + 1; epoch <= e.Epoch; epoch++ {
		epochs = append(epochs, epoch)
	}
	for _, epoch := range epochs {
		name := catalog.StoredName(fp, epoch)
		if _, noted := s.kept.Leftovers[name]; !noted {
			s.leftLocked(name, catalog.Leftover{Space: fp, Epoch: epoch, Unused: true, Due: now.UnixMilli()})
		}
	}
	s.changedNow()
}

var errMarksUnread = errors.New("marks of use cannot be read")

// unmarked is the names that may be looked for in a tier: of spaces that are unused by all nodes,
// those whose marks were missing once before, long enough ago for nodes to put them back.
func (l *lane) unmarked(ctx context.Context, names []pool.Fingerprint) ([]pool.Fingerprint, error) {
	if l.Local || !l.lists() {
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
	return l.p.spaces.withoutMarks(l, names, used, now), nil
}

// unusedOf is the spaces of names that are leftovers only because no node is believed to use them.
func (s *spaces) unusedOf(names []pool.Fingerprint) (all []pool.Fingerprint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if left, still := s.kept.Leftovers[name]; still && left.Unused && !slices.Contains(all, left.Space) {
			all = append(all, left.Space)
		}
	}
	return all
}

// withoutMarks ends the collection of what other nodes use in a tier, and is the names that may be
// looked for now.
func (s *spaces) withoutMarks(
	l *lane, names []pool.Fingerprint, used map[pool.Fingerprint]bool, now time.Time,
) (free []pool.Fingerprint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	settle := max(s.after, 2*followFull*l.p.o.EpochEvery)
	for _, name := range names {
		left, still := s.kept.Leftovers[name]
		if !still || !left.Unused {
			free = append(free, name)
			continue
		}
		done := left.Tiers[l.Name]
		switch {
		case used[left.Space]:
			done.N = collectLooks
			s.usedElsewhere(left.Space, now)
		case done.Clear == 0:
			done.Clear, done.Next = now.UnixMilli(), now.Add(settle).UnixMilli()
		default:
			free = append(free, name)
			continue
		}
		left.Tiers[l.Name] = done
		s.dirty = true
		if !l.p.waits(&left) {
			s.collectedLocked(name, left)
		}
	}
	return free
}

// usedElsewhere notes when another node was seen to use a space: it is asked for again after that.
func (s *spaces) usedElsewhere(fp pool.Fingerprint, now time.Time) {
	e, known := s.kept.Spaces[fp]
	if !known {
		return
	}
	if e.Seen == 0 {
		s.elsewhere++
	}
	e.Seen = now.Unix()
	s.kept.Spaces[fp] = e
}
