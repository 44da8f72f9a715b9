package tier

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/tier/catalog"
	"github.com/kvagent/kvagent/pool/tier/transit"
)

// spaces holds the open spaces and their names in the tiers.
//
// A reset makes everything stored before unfindable. Memory does it by its own epoch. In the tiers
// it is done by name: catalog.StoredName derives the name from the fingerprint and a counter, the
// tier epoch, which a reset increments. Nothing written under an earlier name is found again,
// however late it arrives. All nodes derive the same name, and learn of new epochs by markers in
// the shared tiers (markers.go). The epoch is on disk before the reset returns, so that a later
// process does not find what was reset. The old names are collected later (collect.go).
type spaces struct {
	path  string
	write func(path string, k *catalog.Catalog) error
	after time.Duration // CollectAfter

	changeMu sync.Mutex    // one change of the catalog at a time, including its write to disk; taken before mu
	changed  chan struct{} // cap 1: the catalog is to be saved, or has a new orphan

	mu         sync.Mutex // a space opens, closes or gets another name; never held during disk I/O
	catalog    *catalog.Catalog
	dirty      bool                           // catalog differs from the file
	unsaved    map[pool.Fingerprint]bool      // private or named spaces that the file lacks: no tiers until it has them
	off        map[pool.Fingerprint]bool      // a reset was not saved: no tiers, even if opened again
	failed     map[pool.Fingerprint]bool      // a reset found no new epoch: off until one does
	idle       map[pool.Fingerprint]time.Time // private spaces without an engine: since when
	active     map[pool.Fingerprint]bool      // named spaces with an engine
	retired    map[pool.Fingerprint]bool      // spaces that are collected: no tiers until used
	opened     time.Time
	all        atomic.Pointer[[]*space] // by SpaceID; nil if not open
	adopted    uint64                   // resets of other nodes
	again      uint64                   // resets that another node's competed with
	lost       uint64                   // orphans that were not recorded
	unused     uint64                   // named spaces that were retired
	elsewhere  uint64                   // of those, spaces that another node was found to use
	loggedLost uint64                   // of saveLoop
	loggedAt   time.Time                // of saveLoop
	onAdopted  func(pool.Fingerprint)
}

// space is a space that is open in memory.
type space struct {
	spec   pool.Spec
	groups []group
	now    atomic.Pointer[era]

	prefill prefill
}

// group is what the entries of a group share.
type group struct {
	memory int64   // bytes of an entry in memory, rounded up
	staged int64   // bytes of an entry's values in staging
	at     []int64 // offset of each shard's value in an entry's loan
	tokens uint32
	fits   bool // in half of staging
}

// era is a space between two resets.
type era struct {
	stored pool.Fingerprint // its name in the tiers
	epoch  uint32           // in memory; 0 during a reset
	off    bool             // the tiers are not used: the epoch is not saved, or the space is being collected
}

// open reads the catalog and prepares what it holds.
func (s *spaces) open(o *Options) (err error) {
	s.path, s.write, s.after = o.State, catalog.Write, o.CollectAfter
	s.catalog, s.changed = catalog.New(), make(chan struct{}, 1)
	s.unsaved, s.off = map[pool.Fingerprint]bool{}, map[pool.Fingerprint]bool{}
	s.failed = map[pool.Fingerprint]bool{}
	s.idle, s.retired = map[pool.Fingerprint]time.Time{}, map[pool.Fingerprint]bool{}
	s.active, s.opened = map[pool.Fingerprint]bool{}, o.Clock()
	s.all.Store(&[]*space{})
	if s.path == "" {
		return nil
	}
	if s.catalog, err = catalog.Read(s.path); err != nil {
		return err
	}
	now := o.Clock()
	for fp, e := range s.catalog.Spaces {
		if e.Private {
			s.idle[fp] = now // its engine has CollectAfter to return
		}
	}
	fresh := false
	for name, left := range s.catalog.Orphans {
		if left.NotBefore == 0 { // of format 1
			left.NotBefore, fresh = now.Add(s.after).UnixMilli(), true
			s.catalog.Orphans[name] = left
		}
		switch {
		case left.Unused && o.CollectUnused == 0:
			delete(s.catalog.Orphans, name)
		case left.Unused: // its engine may return, too
			s.retired[left.Space] = true
			left.NotBefore = max(left.NotBefore, now.Add(s.after).UnixMilli())
			s.catalog.Orphans[name] = left
		}
	}
	if fresh {
		return s.write(s.path, s.catalog)
	}
	return nil
}

// get returns an open space, or nil.
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
	out.tokens, out.fits = g.BlockTokens, out.staged <= staging/2
	return out
}

// OpenSpace implements pool.Spaces.
func (p *Pool) OpenSpace(spec pool.Spec) (pool.SpaceID, error) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	id, err := p.memory.OpenSpace(spec)
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
	p.spaces.nameLocked(sp, p.memory.Epoch(id))
	all := append([]*space(nil), *p.spaces.all.Load()...)
	for len(all) <= int(id) {
		all = append(all, nil)
	}
	all[id] = sp
	p.spaces.all.Store(&all)
	p.follow()
	return id, nil
}

// ResetSpace implements pool.Spaces. From its start on no tier finds what was stored before. If the
// tier epoch cannot be saved, memory begins its new epoch nevertheless, the tiers are off for the
// space until it is saved, and the error says so: the caller must not report the reset as done,
// since a later process would find again what was reset.
func (p *Pool) ResetSpace(id pool.SpaceID) (uint32, error) {
	sp := p.spaces.get(id)
	if sp == nil || len(p.levels) == 0 {
		return p.memory.ResetSpace(id)
	}
	unsaved := p.rename(sp.spec.Fingerprint, p.nextEpoch)
	if unsaved != nil {
		p.o.Log("", "saving a reset failed: the tiers are not used for the space until it is saved", unsaved)
	}
	defer p.follow()
	epoch, err := p.resetMemory(id, sp)
	return epoch, errors.Join(err, unsaved)
}

// resetMemory starts a new epoch in memory, for a space that has its new name.
func (p *Pool) resetMemory(id pool.SpaceID, sp *space) (uint32, error) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	p.cancelSpace(id)
	epoch, err := p.memory.ResetSpace(id)
	if p.spaces.get(id) == sp {
		p.spaces.nameLocked(sp, p.memory.Epoch(id))
	}
	return epoch, err
}

// nameLocked gives an open space the name of its tier epoch, from an epoch in memory on. A name in
// use is no orphan.
func (s *spaces) nameLocked(sp *space, epoch uint32) {
	fp := sp.spec.Fingerprint
	name := catalog.StoredName(fp, s.catalog.Spaces[fp].Epoch)
	off := s.off[fp] || s.unsaved[fp] || s.retired[fp]
	if _, left := s.catalog.Orphans[name]; left && !s.retired[fp] {
		delete(s.catalog.Orphans, name)
		s.dirty = true
	}
	sp.now.Store(&era{stored: name, epoch: epoch, off: off})
}

// CloseSpace implements pool.Spaces. What the tiers have of the space stays and is found when it is
// opened again.
func (p *Pool) CloseSpace(id pool.SpaceID) error {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	if err := p.memory.CloseSpace(id); err != nil {
		return err
	}
	all := append([]*space(nil), *p.spaces.all.Load()...)
	sp := all[id]
	all[id] = nil
	p.spaces.all.Store(&all)
	if sp != nil {
		sp.now.Store(&era{off: true}) // entries in flight belong to the old era, even if the ID is reused
		p.spaces.closedLocked(sp.spec.Fingerprint)
	}
	p.cancelSpace(id)
	return nil
}

// closedLocked drops the retired flag of a space whose names were all collected while it was open.
func (s *spaces) closedLocked(fp pool.Fingerprint) {
	if _, ok := s.catalog.Spaces[fp]; !ok && !s.openLocked(fp) {
		delete(s.retired, fp)
	}
}

func (s *spaces) openLocked(fp pool.Fingerprint) bool {
	return slices.ContainsFunc(*s.all.Load(), func(sp *space) bool { return sp != nil && sp.spec.Fingerprint == fp })
}

// Sweep implements pool.Spaces.
func (p *Pool) Sweep() { p.memory.Sweep() }

// Epoch implements pool.Spaces.
func (p *Pool) Epoch(id pool.SpaceID) uint32 { return p.memory.Epoch(id) }

// SetPressure implements pool.Spaces.
func (p *Pool) SetPressure(f func(need int64) bool) { p.memory.SetPressure(f) }

// Stats implements pool.Spaces, for memory alone.
func (p *Pool) Stats() pool.Stats { return p.memory.Stats() }

var _ pool.Mapped = (*Pool)(nil)

// Arena implements pool.Mapped with memory's arena.
func (p *Pool) Arena() (base []byte, fd int) { return p.memory.Arena() }

// key returns the key of a shard in the tiers.
func (e *era) key(k *entryKey, shard uint8) pool.Key {
	return pool.Key{Space: e.stored, Group: k.group, Shard: shard, Hash: k.hash}
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

var _ pool.Forgetter = (*Pool)(nil)

// Forget implements pool.Forgetter: it resets a space, which need not be open. The space gets
// another name in the tiers, and persistent memory drops its entries.
func (p *Pool) Forget(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		_, err := p.ResetSpace(id)
		return err
	}
	if len(p.levels) > 0 {
		if err := p.rename(fp, p.nextEpoch); err != nil {
			return err
		}
	}
	defer p.follow()
	return p.forgetMemory(fp)
}

// forgetMemory drops what memory has of a space that has its new name in the tiers.
func (p *Pool) forgetMemory(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		if sp := p.spaces.get(id); sp != nil {
			_, err := p.resetMemory(id, sp)
			return err
		}
	}
	if m, ok := p.memory.(pool.Forgetter); ok {
		return m.Forget(fp)
	}
	return nil
}

// openID returns the ID of a space that is open.
func (p *Pool) openID(fp pool.Fingerprint) (pool.SpaceID, bool) {
	for id, sp := range *p.spaces.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			return pool.SpaceID(id), true
		}
	}
	return 0, false
}
