package tier

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
)

// maxOldNames bounds the names that one change of epochs orphans. A node that was away records
// those that it may have written, and the latest that others may have.
const maxOldNames = 16

// nextEpoch is the change of a reset: the next epoch, which other nodes may claim too.
func (p *Pool) nextEpoch(e *catalog.Space) error { return p.claimEpoch(e, e.Epoch+1) }

// claimEpoch sets an epoch as a reset of this node, with a claim if any tier is shared.
func (p *Pool) claimEpoch(e *catalog.Space, epoch uint64) (err error) {
	if epoch > catalog.MaxEpoch {
		return fmt.Errorf("tier epoch %d, allowed: at most %d", epoch, uint64(catalog.MaxEpoch))
	}
	e.Epoch, e.Claim, e.Confirmed = epoch, catalog.Nonce{}, nil
	if p.shared() {
		e.Claim, err = catalog.NewNonce()
	}
	return err
}

// shared reports whether some tier is used by other nodes.
func (p *Pool) shared() bool {
	for _, l := range p.levels {
		if !l.Local {
			return true
		}
	}
	return false
}

// rename gives a space another epoch, and so another name in the tiers, and saves the catalog. The
// tiers are not used for the space before it is on disk.
func (p *Pool) rename(fp pool.Fingerprint, change func(*catalog.Space) error) error {
	s := &p.spaces
	s.changeMu.Lock()
	defer s.changeMu.Unlock()
	if err := p.change(fp, change); err != nil {
		return err
	}
	return p.saveCatalog()
}

// change updates a space in the catalog. Until the catalog is saved the space is off in all tiers,
// whether it is open now or opened meanwhile.
func (p *Pool) change(fp pool.Fingerprint, change func(*catalog.Space) error) error {
	s := &p.spaces
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off[fp] = true
	for _, sp := range *s.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			sp.now.Store(&era{})
		}
	}
	e := s.catalog.Spaces[fp]
	before := e.Epoch
	if err := change(&e); err != nil {
		s.failed[fp] = true
		return err
	}
	delete(s.failed, fp)
	e.Used = p.now().Unix()
	p.evictSpaceLocked(fp, e.Used)
	s.catalog.Spaces[fp] = e
	s.dirty = true
	if e.Named { // follow it again, so that other nodes learn of the reset
		delete(s.retired, fp)
		s.restoreLocked(fp)
	}
	if e.Epoch > before {
		p.orphanLocked(fp, before, e)
	}
	return nil
}

// orphanLocked records the names of a space that a new epoch made orphans. The node that made the
// epoch scans first; others scan at a random time after that.
func (p *Pool) orphanLocked(fp pool.Fingerprint, before uint64, e catalog.Space) {
	due := p.spaces.after
	if e.Claim == (catalog.Nonce{}) && p.shared() {
		due += rand.N(due)
	}
	at := p.now().Add(due).UnixMilli()
	p.spaces.addOrphanLocked(catalog.StoredName(fp, before), catalog.Orphan{Space: fp, Epoch: before, NotBefore: at})
	for epoch := max(before+1, e.Epoch-min(e.Epoch, maxOldNames)); epoch < e.Epoch; epoch++ {
		p.spaces.addOrphanLocked(catalog.StoredName(fp, epoch), catalog.Orphan{Space: fp, Epoch: epoch, NotBefore: at})
	}
}

// addOrphanLocked records an orphan. Beyond the bound it drops, and counts, the one whose scan
// could begin first.
func (s *spaces) addOrphanLocked(name pool.Fingerprint, left catalog.Orphan) {
	if _, noted := s.catalog.Orphans[name]; !noted && len(s.catalog.Orphans) >= catalog.MaxOrphans {
		var first pool.Fingerprint
		due := int64(-1)
		for other, l := range s.catalog.Orphans {
			if due < 0 || l.NotBefore < due {
				first, due = other, l.NotBefore
			}
		}
		delete(s.catalog.Orphans, first)
		s.lost++
	}
	left.Tiers = map[string]catalog.Scans{}
	s.catalog.Orphans[name] = left
	s.dirty = true
}

// evictSpaceLocked makes room in the catalog for one more space. It removes the least recently used
// one, preferably without orphans, and makes its name an orphan: in all tiers if it is private,
// otherwise in local tiers alone, since other nodes may use the name. For a named space the rest is
// counted as lost. A removed space that returns learns its epoch from the markers in the shared
// tiers.
func (p *Pool) evictSpaceLocked(fp pool.Fingerprint, now int64) {
	s := &p.spaces
	if _, ok := s.catalog.Spaces[fp]; ok || len(s.catalog.Spaces) < catalog.MaxSpaces {
		return
	}
	busy := map[pool.Fingerprint]bool{}
	for _, left := range s.catalog.Orphans {
		busy[left.Space] = true
	}
	open := map[pool.Fingerprint]bool{}
	for _, sp := range *s.all.Load() {
		if sp != nil {
			open[sp.spec.Fingerprint] = true
		}
	}
	maps.Copy(open, s.active)
	var victim pool.Fingerprint
	found, worth := false, int64(0)
	for other, e := range s.catalog.Spaces {
		w := e.Used
		if busy[other] {
			w += 1 << 40
		}
		if !open[other] && (!found || w < worth) {
			victim, worth, found = other, w, true
		}
	}
	if !found {
		return // more spaces are open than the bound: the file grows
	}
	e := s.catalog.Spaces[victim]
	delete(s.catalog.Spaces, victim)
	delete(s.idle, victim)
	delete(s.retired, victim)
	if e.Named {
		s.lost++
	}
	left := catalog.Orphan{Space: victim, Epoch: e.Epoch, Private: e.Private, Local: !e.Private}
	left.NotBefore = time.Unix(now, 0).Add(s.after).UnixMilli()
	if slices.ContainsFunc(p.levels, func(l *level) bool { return l.covers(&left) }) {
		s.addOrphanLocked(catalog.StoredName(victim, e.Epoch), left)
	}
}

// saveCatalog writes the catalog to disk; the caller holds changeMu. Spaces that were off only
// because the catalog was not on disk get their names in the tiers again; those whose memory is
// still to be reset get them then.
func (p *Pool) saveCatalog() error {
	s := &p.spaces
	s.mu.Lock()
	now := s.catalog.Clone()
	waited := make(map[pool.Fingerprint]bool, len(s.off)+len(s.unsaved))
	maps.Copy(waited, s.off)
	maps.Copy(waited, s.unsaved)
	s.dirty = false
	s.mu.Unlock()
	var err error
	if s.path != "" {
		err = s.write(s.path, now)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.dirty = true
		return err
	}
	for fp := range waited {
		if !s.failed[fp] { // a missing epoch is not made up for by saving
			delete(s.off, fp)
		}
		delete(s.unsaved, fp)
	}
	for id, sp := range *s.all.Load() {
		if sp != nil && waited[sp.spec.Fingerprint] && sp.now.Load().epoch != 0 {
			s.nameLocked(sp, p.memory.Epoch(pool.SpaceID(id)))
		}
	}
	return nil
}

// flush saves the catalog if it has changed.
func (p *Pool) flush() {
	s := &p.spaces
	s.changeMu.Lock()
	defer s.changeMu.Unlock()
	s.mu.Lock()
	dirty := s.dirty
	s.mu.Unlock()
	if !dirty {
		return
	}
	if err := p.saveCatalog(); err != nil {
		p.o.Log("", "writing the catalog of resets failed", err)
	}
}

// saveLoop saves changes that no caller waits for, and retires spaces that are no longer used.
func (p *Pool) saveLoop(ctx context.Context) {
	tick := time.NewTicker(p.o.EpochEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.spaces.changed:
		}
		p.retire()
		p.retireUnused()
		p.flush()
		p.logLost()
	}
}

func (s *spaces) changedNow() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

var _ pool.SpaceUse = (*Pool)(nil)

// logLost logs, at most once per logEvery, that names will not be collected because the catalog has
// too many.
func (p *Pool) logLost() {
	p.spaces.mu.Lock()
	lost := p.spaces.lost
	p.spaces.mu.Unlock()
	if now := p.now(); lost > p.spaces.loggedLost && now.Sub(p.spaces.loggedAt) >= logEvery {
		p.spaces.loggedLost, p.spaces.loggedAt = lost, now
		p.o.Log("", fmt.Sprintf("%d names of spaces will not be collected: the catalog is full", lost), nil)
	}
}

// InUse implements pool.SpaceUse. A private or named space is in the catalog on disk before its
// first byte is in a tier, so that it is collected even if this process dies.
func (p *Pool) InUse(fp pool.Fingerprint, g pool.Generation) {
	s := &p.spaces
	if len(p.levels) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.catalog.Spaces[fp]
	collected := g == pool.PrivateGeneration || g == pool.NamedGeneration && p.o.CollectUnused > 0
	if ok || collected {
		e.Used, e.Private, e.Named = p.now().Unix(), g == pool.PrivateGeneration, g == pool.NamedGeneration
		p.evictSpaceLocked(fp, e.Used)
		s.catalog.Spaces[fp] = e
		s.dirty = true
	}
	delete(s.idle, fp)
	if g == pool.NamedGeneration {
		p.inUseLocked(fp)
	}
	if collected && !ok && s.path != "" {
		s.unsaved[fp] = true
		s.changedNow()
	}
	if s.retired[fp] {
		delete(s.retired, fp)
		for id, sp := range *s.all.Load() {
			if sp != nil && sp.spec.Fingerprint == fp {
				s.nameLocked(sp, p.memory.Epoch(pool.SpaceID(id)))
			}
		}
	}
}

// NotInUse implements pool.SpaceUse.
func (p *Pool) NotInUse(fp pool.Fingerprint) {
	s := &p.spaces
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.catalog.Spaces[fp]
	switch {
	case e.Private:
		s.idle[fp] = p.now()
	case e.Named && s.active[fp]:
		e.Used = p.now().Unix()
		s.catalog.Spaces[fp] = e
		s.dirty = true
	}
	delete(s.active, fp)
}

// OnAdopted implements pool.SpaceUse.
func (p *Pool) OnAdopted(then func(pool.Fingerprint)) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	p.spaces.onAdopted = then
}

// retire takes private spaces whose engines disconnected CollectAfter ago out of the tiers and
// makes their names orphans.
func (p *Pool) retire() {
	s := &p.spaces
	s.mu.Lock()
	defer s.mu.Unlock()
	now := p.now()
	for fp, since := range s.idle {
		if now.Sub(since) < s.after {
			continue
		}
		delete(s.idle, fp)
		s.retired[fp] = true
		for _, sp := range *s.all.Load() {
			if sp != nil && sp.spec.Fingerprint == fp {
				sp.now.Store(&era{off: true}) // what memory still has of it is not written to tiers
			}
		}
		e := s.catalog.Spaces[fp]
		s.addOrphanLocked(catalog.StoredName(fp, e.Epoch), catalog.Orphan{
			Space: fp, Epoch: e.Epoch, Private: true, NotBefore: now.UnixMilli(),
		})
		s.changedNow()
	}
}
