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

// leftNames bounds the names that one change of epochs leaves behind: a node that was away notes
// those that it may have written, and the latest that others may have.
const leftNames = 16

// nextEpoch is what a reset changes: the epoch, which other nodes may have made as well until the
// claim has won.
func (p *Pool) nextEpoch(e *catalog.Space) error { return p.claimEpoch(e, e.Epoch+1) }

// claimEpoch makes an epoch this node's own reset.
func (p *Pool) claimEpoch(e *catalog.Space, epoch uint64) (err error) {
	if epoch > catalog.MaxEpoch {
		return fmt.Errorf("tier epoch %d, allowed: at most %d", epoch, uint64(catalog.MaxEpoch))
	}
	e.Epoch, e.Claim, e.Told = epoch, catalog.Nonce{}, nil
	if p.shared() {
		e.Claim, err = catalog.NewNonce()
	}
	return err
}

// shared reports whether some tier is used by other nodes.
func (p *Pool) shared() bool {
	for _, l := range p.lanes {
		if !l.Local {
			return true
		}
	}
	return false
}

// rename gives a space another epoch, and so another name in the tiers, and keeps it: once it is on
// disk, the space goes on under it. Until then, and if it cannot be kept, the tiers are not used
// for the space. Only changes of epochs wait for the disk.
func (p *Pool) rename(fp pool.Fingerprint, change func(*catalog.Space) error) error {
	s := &p.spaces
	s.turning.Lock()
	defer s.turning.Unlock()
	if err := p.change(fp, change); err != nil {
		return err
	}
	return p.keep()
}

// change changes what is kept of a space. What is open of it leaves the tiers, and what is opened
// meanwhile does not enter.
func (p *Pool) change(fp pool.Fingerprint, change func(*catalog.Space) error) error {
	s := &p.spaces
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off[fp] = true
	for _, sp := range *s.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			sp.now.Store(&life{})
		}
	}
	e := s.kept.Spaces[fp]
	before := e.Epoch
	if err := change(&e); err != nil {
		s.failed[fp] = true
		return err
	}
	delete(s.failed, fp)
	e.Used = p.now().Unix()
	p.roomLocked(fp, e.Used)
	s.kept.Spaces[fp] = e
	s.dirty = true
	if e.Named { // it is followed again, so that other nodes hear of the reset
		delete(s.retired, fp)
		s.restoreLocked(fp)
	}
	if e.Epoch > before {
		p.leaveLocked(fp, before, e)
	}
	return nil
}

// leaveLocked notes the names of a space that another epoch left behind. Whoever made that epoch
// looks first, and nodes that hear of it later, each at a time of its own.
func (p *Pool) leaveLocked(fp pool.Fingerprint, before uint64, e catalog.Space) {
	due := p.spaces.after
	if e.Claim == (catalog.Nonce{}) && p.shared() {
		due += rand.N(due)
	}
	at := p.now().Add(due).UnixMilli()
	p.spaces.leftLocked(catalog.StoredName(fp, before), catalog.Leftover{Space: fp, Epoch: before, Due: at})
	for epoch := max(before+1, e.Epoch-min(e.Epoch, leftNames)); epoch < e.Epoch; epoch++ {
		p.spaces.leftLocked(catalog.StoredName(fp, epoch), catalog.Leftover{Space: fp, Epoch: epoch, Due: at})
	}
}

// leftLocked notes a leftover. Beyond the bound the one that is due first goes, counted: it was
// looked for longest.
func (s *spaces) leftLocked(name pool.Fingerprint, left catalog.Leftover) {
	if _, noted := s.kept.Leftovers[name]; !noted && len(s.kept.Leftovers) >= catalog.MaxLeftovers {
		var first pool.Fingerprint
		due := int64(-1)
		for other, l := range s.kept.Leftovers {
			if due < 0 || l.Due < due {
				first, due = other, l.Due
			}
		}
		delete(s.kept.Leftovers, first)
		s.lost++
	}
	left.Tiers = map[string]catalog.Looks{}
	s.kept.Leftovers[name] = left
	s.dirty = true
}

// roomLocked makes room for one more space: the one that was used least recently goes, of those of
// which nothing is left to be collected if there is one. What it has under its name now is left
// over: in local tiers alone unless it is private, since other nodes may use that name: of a named
// one this node does not collect the rest, which is counted. If it comes back, it finds its epoch by
// the markers in the shared tiers.
func (p *Pool) roomLocked(fp pool.Fingerprint, now int64) {
	s := &p.spaces
	if _, known := s.kept.Spaces[fp]; known || len(s.kept.Spaces) < catalog.MaxSpaces {
		return
	}
	busy := map[pool.Fingerprint]bool{}
	for _, left := range s.kept.Leftovers {
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
	for other, e := range s.kept.Spaces {
		w := e.Used
		if busy[other] {
			w += 1 << 40
		}
		if !open[other] && (!found || w < worth) {
			victim, worth, found = other, w, true
		}
	}
	if !found {
		return // more spaces are open than are kept: the file grows
	}
	e := s.kept.Spaces[victim]
	delete(s.kept.Spaces, victim)
	delete(s.idle, victim)
	delete(s.retired, victim)
	if e.Named {
		s.lost++
	}
	left := catalog.Leftover{Space: victim, Epoch: e.Epoch, Private: e.Private, Local: !e.Private}
	left.Due = time.Unix(now, 0).Add(s.after).UnixMilli()
	if slices.ContainsFunc(p.lanes, func(l *lane) bool { return l.concerns(&left) }) {
		s.leftLocked(catalog.StoredName(victim, e.Epoch), left)
	}
}

// keep writes what is kept to disk; turning is held. Spaces that were without tiers because what is
// kept of them was not on disk have them again, but for those whose memory is still to be reset,
// which get their names then.
func (p *Pool) keep() error {
	s := &p.spaces
	s.mu.Lock()
	now := s.kept.Clone()
	waited := make(map[pool.Fingerprint]bool, len(s.off)+len(s.unkept))
	maps.Copy(waited, s.off)
	maps.Copy(waited, s.unkept)
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
		if !s.failed[fp] { // nothing on disk makes up for an epoch that there is not
			delete(s.off, fp)
		}
		delete(s.unkept, fp)
	}
	for id, sp := range *s.all.Load() {
		if sp != nil && waited[sp.spec.Fingerprint] && sp.now.Load().epoch != 0 {
			s.nameLocked(sp, p.memory.Epoch(pool.SpaceID(id)))
		}
	}
	return nil
}

// flush keeps what has changed since, if anything.
func (p *Pool) flush() {
	s := &p.spaces
	s.turning.Lock()
	defer s.turning.Unlock()
	s.mu.Lock()
	dirty := s.dirty
	s.mu.Unlock()
	if !dirty {
		return
	}
	if err := p.keep(); err != nil {
		p.o.Log("", "what is kept of resets cannot be written", err)
	}
}

// keepAlways keeps what changes without anybody waiting for it, and retires private spaces whose
// engines are gone.
func (p *Pool) keepAlways(ctx context.Context) {
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
		p.sayLost()
	}
}

func (s *spaces) changedNow() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

var _ pool.SpaceUse = (*Pool)(nil)

// sayLost says when something will not be collected because too much is kept already.
func (p *Pool) sayLost() {
	p.spaces.mu.Lock()
	lost := p.spaces.lost
	p.spaces.mu.Unlock()
	if lost > p.spaces.saidLost {
		p.spaces.saidLost = lost
		p.o.Log("", fmt.Sprintf("%d names of spaces are not collected: too many are kept", lost), nil)
	}
}

// InUse implements pool.SpaceUse. A private or named space is on disk before the first byte of it is
// in a tier: so that it is collected, whatever becomes of this process.
func (p *Pool) InUse(fp pool.Fingerprint, g pool.Generation) {
	s := &p.spaces
	if len(p.lanes) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, known := s.kept.Spaces[fp]
	collected := g == pool.PrivateGeneration || g == pool.NamedGeneration && p.o.CollectUnused > 0
	if known || collected {
		e.Used, e.Private, e.Named = p.now().Unix(), g == pool.PrivateGeneration, g == pool.NamedGeneration
		p.roomLocked(fp, e.Used)
		s.kept.Spaces[fp] = e
		s.dirty = true
	}
	delete(s.idle, fp)
	if g == pool.NamedGeneration {
		p.inUseLocked(fp)
	}
	if collected && !known && s.path != "" {
		s.unkept[fp] = true
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
	e := s.kept.Spaces[fp]
	switch {
	case e.Private:
		s.idle[fp] = p.now()
	case e.Named && s.active[fp]:
		e.Used = p.now().Unix()
		s.kept.Spaces[fp] = e
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

// retire takes the private spaces out of the tiers whose engines have been gone for CollectAfter:
// what is under their names is left over.
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
				sp.now.Store(&life{off: true}) // what memory still has of it is written nowhere
			}
		}
		e := s.kept.Spaces[fp]
		s.leftLocked(catalog.StoredName(fp, e.Epoch), catalog.Leftover{Space: fp, Epoch: e.Epoch, Private: true, Due: now.UnixMilli()})
		s.changedNow()
	}
}
