package tier

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/names"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// spaces holds the open spaces. Look-ups read it without a lock.
//
// A reset makes everything stored before unfindable. Memory does it by its own epoch. In the tiers
// it is done by name, see package names: nothing written under an earlier name is found again.
type spaces struct {
	mu        sync.Mutex               // guards all writes of the fields below and of each space's now
	all       atomic.Pointer[[]*space] // by SpaceID; nil if not open
	onAdopted func(pool.Fingerprint)
}

// space is a space that is open in memory.
type space struct {
	spec   pool.Spec
	groups []group
	now    atomic.Pointer[era]
}

// group is what the entries of a group share.
type group struct {
	memory int64   // bytes of an entry in memory, rounded up
	staged int64   // bytes of an entry's values in staging
	at     []int64 // offset of each shard's value in an entry's loan
	fits   bool    // in half of staging
}

func (s *spaces) get(id pool.SpaceID) *space {
	all := *s.all.Load()
	if int(id) >= len(all) {
		return nil
	}
	return all[id]
}

// slotUnit is what memory rounds a shard up to, bytes.
const slotUnit = 1024

func newGroup(g *pool.Group, staging int64) (out group) {
	for _, n := range g.ShardBytes {
		out.memory += (int64(n) + slotUnit - 1) &^ (slotUnit - 1)
		out.at = append(out.at, out.staged)
		out.staged += transit.RoundUp(int64(n) + transit.HeaderBytes)
	}
	out.fits = out.staged <= staging/2
	return out
}

// OpenSpace implements pool.Spaces.
func (p *Pool) OpenSpace(spec pool.Spec) (pool.SpaceID, error) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	id, err := p.Memory.OpenSpace(spec)
	if err != nil || p.spaces.get(id) != nil {
		return id, err
	}
	sp := &space{spec: spec}
	for g := range spec.Groups {
		sp.groups = append(sp.groups, newGroup(&spec.Groups[g], p.o.Staging.Size()))
		if !sp.groups[g].fits {
			p.o.Log("", fmt.Sprintf("blocks of %d bytes are too large for staging: they stay in memory",
				sp.groups[g].memory), nil)
		}
	}
	if !spec.Private {
		p.names.Opened(spec.Fingerprint)
	}
	sp.begin(p.nameOf(sp), p.Memory.Epoch(id))
	all := append([]*space(nil), *p.spaces.all.Load()...)
	for len(all) <= int(id) {
		all = append(all, nil)
	}
	all[id] = sp
	p.spaces.all.Store(&all)
	p.names.Follow()
	return id, nil
}

// ResetSpace implements pool.Spaces. From its start on no tier finds what was stored before. If the
// tier epoch cannot be saved, memory begins its new epoch nevertheless, the tiers are off for the
// space until it is saved, and the error says so: the caller must not report the reset as done,
// since a later process would find again what was reset.
func (p *Pool) ResetSpace(id pool.SpaceID) (uint32, error) {
	sp := p.spaces.get(id)
	if sp == nil || len(p.levels) == 0 {
		return p.Memory.ResetSpace(id)
	}
	if sp.spec.Private {
		return p.resetMemory(id, sp)
	}
	unsaved := p.names.Reset(sp.spec.Fingerprint)
	due := p.names.Epoch(sp.spec.Fingerprint)
	if unsaved != nil {
		p.o.Log("", "saving a reset failed: the tiers are not used for the space until it is saved", unsaved)
	}
	defer p.names.Follow()
	epoch, err := p.resetMemory(id, sp)
	if err != nil && p.spaces.get(id) != sp { // it was closed meanwhile: memory has dropped all of it
		p.names.Forgotten(sp.spec.Fingerprint, due)
		p.renamed(sp.spec.Fingerprint)
	}
	return epoch, errors.Join(err, p.endReset(sp.spec.Fingerprint), unsaved)
}

// CloseSpace implements pool.Spaces. The tiers keep the space's entries for its next opening.
func (p *Pool) CloseSpace(id pool.SpaceID) error {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	due, sp := uint64(0), p.spaces.get(id)
	if sp != nil {
		due = p.names.Epoch(sp.spec.Fingerprint)
	}
	if err := p.Memory.CloseSpace(id); err != nil {
		return err
	}
	all := append([]*space(nil), *p.spaces.all.Load()...)
	all[id] = nil
	p.spaces.all.Store(&all)
	if sp != nil {
		sp.now.Store(&era{off: true})               // entries in flight belong to the old era, even if the ID is reused
		p.names.Forgotten(sp.spec.Fingerprint, due) // memory has dropped all of it
		p.names.Closed(sp.spec.Fingerprint)
	}
	p.cancelSpace(id)
	return nil
}

// ownKey returns the key of a shard in memory, which its checksum is bound to.
func (s *space) ownKey(k *entryKey, shard uint8) pool.Key {
	return pool.Key{Space: s.spec.Fingerprint, Group: k.group, Shard: shard, Hash: k.hash}
}

// group returns a group's layout, or nil if tiers do not hold its entries.
func (s *space) group(g uint8) *group {
	if s == nil || int(g) >= len(s.groups) || !s.groups[g].fits {
		return nil
	}
	return &s.groups[g]
}

// Forget implements pool.Memory: it resets a space, which need not be open. The space gets
// another name in the tiers, and persistent memory drops its entries.
func (p *Pool) Forget(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		_, err := p.ResetSpace(id)
		return err
	}
	if len(p.levels) > 0 {
		if err := p.names.Reset(fp); err != nil {
			return errors.Join(err, p.forgetUnsaved(fp), p.endReset(fp))
		}
	}
	defer p.names.Follow()
	return p.forgetMemory(fp)
}

// forgetUnsaved ends the reset of a space that could not be saved. If it was opened meanwhile, its
// opener would not learn of another epoch in memory.
func (p *Pool) forgetUnsaved(fp pool.Fingerprint) error {
	if _, open := p.openID(fp); !open {
		return p.forgetMemory(fp)
	}
	p.names.Forgotten(fp, p.names.Epoch(fp))
	return nil
}

func (p *Pool) openID(fp pool.Fingerprint) (pool.SpaceID, bool) {
	for id, sp := range *p.spaces.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			return pool.SpaceID(id), true
		}
	}
	return 0, false
}

// OnAdopted implements pool.Tiers.
func (p *Pool) OnAdopted(then func(pool.Fingerprint)) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	p.spaces.onAdopted = then
}

// era is a space between two resets. It never changes: another name, epoch or off is another era,
// and what was begun in an earlier one ends without effect.
type era struct {
	stored pool.Fingerprint // its name in the tiers
	epoch  uint32           // in memory; 0 during a reset, and after the space was closed
	off    bool             // the tiers are not used: the space is private, or the epoch is not saved
}

func (e *era) key(k *entryKey, shard uint8) pool.Key {
	return pool.Key{Space: e.stored, Group: k.group, Shard: shard, Hash: k.hash}
}

// begin begins an era of a space, from an epoch in memory on; the caller holds spaces.mu.
func (s *space) begin(name names.Name, epoch uint32) {
	next := era{stored: name.Stored, epoch: epoch, off: name.Off}
	if now := s.now.Load(); now == nil || *now != next {
		s.now.Store(&next)
	}
}

// resetting ends the era of a space whose reset has begun. resetMemory begins the next one.
func (p *Pool) resetting(fp pool.Fingerprint) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	if id, open := p.openID(fp); open {
		p.spaces.get(id).now.Store(&era{})
		p.storage.noteAll()
	}
}

// renamed begins another era of a space whose name has changed, or whether its tiers are off.
func (p *Pool) renamed(fp pool.Fingerprint) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	id, open := p.openID(fp)
	if !open {
		return
	}
	if sp := p.spaces.get(id); sp.now.Load().epoch != 0 { // else resetMemory follows
		sp.begin(p.nameOf(sp), p.Memory.Epoch(id))
		p.storage.noteAll()
	}
}

func (p *Pool) adopted(fp pool.Fingerprint) {
	if err := p.forgetMemory(fp); err != nil {
		p.o.Log("", "a reset by another node could not be applied to memory", err)
	}
	p.spaces.mu.Lock()
	then := p.spaces.onAdopted
	p.spaces.mu.Unlock()
	if _, open := p.openID(fp); open && then != nil {
		then(fp)
	}
}

// resetMemory starts a new epoch in memory, for a space that has its new name.
func (p *Pool) resetMemory(id pool.SpaceID, sp *space) (uint32, error) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	return p.resetMemoryLocked(id, sp)
}

func (p *Pool) resetMemoryLocked(id pool.SpaceID, sp *space) (uint32, error) {
	p.cancelSpace(id)
	due := p.names.Epoch(sp.spec.Fingerprint)
	epoch, err := p.Memory.ResetSpace(id)
	if err == nil {
		p.names.Forgotten(sp.spec.Fingerprint, due)
	}
	if p.spaces.get(id) == sp {
		sp.begin(p.nameOf(sp), p.Memory.Epoch(id))
		p.storage.noteAll()
	}
	return epoch, err
}

// endReset resets the memory of a space that was closed and opened again during its reset, if that
// ended the era of the second one.
func (p *Pool) endReset(fp pool.Fingerprint) (err error) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	if id, open := p.openID(fp); open {
		if sp := p.spaces.get(id); sp.now.Load().epoch == 0 {
			_, err = p.resetMemoryLocked(id, sp)
		}
	}
	return err
}

// forgetMemory drops what memory has of a space that has its new name in the tiers.
func (p *Pool) forgetMemory(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		if sp := p.spaces.get(id); sp != nil {
			_, err := p.resetMemory(id, sp)
			return err
		}
	}
	due := p.names.Epoch(fp)
	if err := p.Memory.Forget(fp); err != nil {
		return err
	}
	p.names.Forgotten(fp, due)
	p.renamed(fp) // it may have been opened meanwhile, in an epoch that is over
	return nil
}

// openNames opens the names of spaces in the levels.
func (p *Pool) openNames() (err error) {
	o := names.Options{
		File:       p.o.file,
		EpochEvery: p.o.EpochEvery,
		Node:       p.o.Node,
		Clock:      p.o.Clock,
		Log:        func(what string, err error) { p.o.Log("", what, err) },
		Resetting:  p.resetting,
		Changed:    p.renamed,
		Adopted:    p.adopted,
	}
	if o.File == nil && p.o.State != "" {
		o.File = catalog.File(p.o.State)
	}
	tiers := make([]names.Tier, len(p.levels))
	for i, l := range p.levels {
		tiers[i] = names.Tier{
			Name: l.Name, Store: l.Store, Local: l.Local, Within: l.PutWithin,
			Up: l.up, Log: l.logLimited,
		}
	}
	if p.names, err = names.Open(o, tiers); err != nil {
		return err
	}
	for _, fp := range p.names.Unforgotten() {
		if err := p.forgetMemory(fp); err != nil {
			return fmt.Errorf("tier: resetting what memory has of a space that was reset: %w", err)
		}
	}
	return nil
}

// nameOf returns how an open space is stored in tiers. A private one is not.
func (p *Pool) nameOf(sp *space) names.Name {
	if sp.spec.Private {
		return names.Name{Off: true}
	}
	return p.names.Use(sp.spec.Fingerprint)
}
