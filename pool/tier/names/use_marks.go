package names

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
// the space. A space that this node has not used for CollectUnused is abandoned: its names become
// orphans. Local tiers are scanned for them as for any other. A shared tier is scanned only if it
// had no mark for the periods that span CollectUnused, twice, at least CollectAfter apart. The
// marks are read again before and during each scan; a mark of another node ends the collection
// there.

// spacesToMark returns the spaces whose marks a tier's store needs: those with an engine, and
// those that were used in this period.
func (n *Names) spacesToMark(span time.Duration, now int64) (all []pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for fp := range n.mu.active {
		all = append(all, fp)
	}
	own := catalog.OwnLength(span)
	for fp, e := range n.mu.catalog.Spaces {
		if e.Named && !n.mu.active[fp] && span > 0 && catalog.PeriodAt(e.Used, own) == catalog.PeriodAt(now, own) {
			all = append(all, fp)
		}
	}
	return all
}

// markRound puts the marks of the current periods that a store may lack, at most followSpaces of
// them.
func (t *tier) markRound(ctx context.Context) error {
	if !t.canList() {
		return nil // nothing is collected there
	}
	span, now := t.names.o.CollectUnused, t.names.now()
	was, is := t.marked, make(map[pool.Key]time.Time)
	t.marked = is
	var keys []pool.Key
	for _, fp := range t.names.spacesToMark(span, now.Unix()) {
		for _, key := range catalog.UseKeys(fp, span, now.Unix()) {
			if until := was[key]; now.Before(until) {
				is[key] = until
			} else if len(keys) < followSpaces {
				keys = append(keys, key)
			}
		}
	}
	status, err := t.askMarkers(ctx, keys)
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
		if err := t.putMarkerKeys(ctx, some); err != nil {
			return err
		}
	}
	for _, key := range keys {
		is[key] = now.Add(FullRound * t.names.o.EpochEvery)
	}
	t.names.marksPut(t, now)
	return nil
}

// marksPut records that a store has use marks, which are to be collected later.
func (n *Names) marksPut(t *tier, now time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, ok := n.mu.catalog.Swept[t.Name]; !ok {
		n.mu.catalog.Swept[t.Name] = now.Unix()
		n.mu.dirty = true
	}
}

// nextMarkSweepLocked returns when the old use marks of a store are to be collected next; ok is
// false if this node never put one there.
func (n *Names) nextMarkSweepLocked(t *tier) (at time.Time, ok bool) {
	last, ok := n.mu.catalog.Swept[t.Name]
	ok = ok && !t.Local && t.canList()
	return time.Unix(last, 0).Add(catalog.Period(catalog.OwnLength(n.o.CollectUnused))), ok
}

var errMarksUnread = errors.New("use marks cannot be read")

// withoutUseMarks returns the names that a tier may be scanned for: of unused spaces only those
// whose marks were missing before too, long enough ago for other nodes to put them back.
func (t *tier) withoutUseMarks(ctx context.Context, names []pool.Fingerprint) ([]pool.Fingerprint, error) {
	if t.Local || !t.canList() {
		return names, nil
	}
	now := t.names.now()
	var keys []pool.Key
	var owner []pool.Fingerprint
	for _, fp := range t.names.unusedOf(names) {
		keys = append(keys, catalog.UnusedKeys(fp, t.names.o.CollectUnused, now.Unix())...)
		for len(owner) < len(keys) {
			owner = append(owner, fp)
		}
	}
	status, err := t.askMarkers(ctx, keys)
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
	return t.names.dropUsed(t, names, used, now), nil
}

// unusedOf returns the spaces of those names that are orphans only because no node is believed to
// use them.
func (n *Names) unusedOf(names []pool.Fingerprint) (all []pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, name := range names {
		if left, still := n.mu.catalog.Orphans[name]; still && left.Unused && !slices.Contains(all, left.Space) {
			all = append(all, left.Space)
		}
	}
	return all
}

// dropUsed ends the collection of names that other nodes use in a tier, and returns the names that
// the tier may be scanned for now.
func (n *Names) dropUsed(
	t *tier, names []pool.Fingerprint, used map[pool.Fingerprint]bool, now time.Time,
) (free []pool.Fingerprint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	settle := max(n.o.CollectAfter, 2*FullRound*n.o.EpochEvery)
	for _, name := range names {
		left, still := n.mu.catalog.Orphans[name]
		if !still || !left.Unused {
			free = append(free, name)
			continue
		}
		done := left.Tiers[t.Name]
		switch {
		case used[left.Space]:
			done.N = collectScans
			n.usedElsewhereLocked(left.Space, now)
		case done.Clear == 0:
			done.Clear, done.Next = now.UnixMilli(), now.Add(settle).UnixMilli()
		default:
			free = append(free, name)
			continue
		}
		left.Tiers[t.Name] = done
		n.mu.dirty = true
		if !n.needsScan(&left) {
			n.collectedLocked(name, left)
		}
	}
	return free
}
