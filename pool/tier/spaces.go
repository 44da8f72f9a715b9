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

// A space and its name in the tiers.
//
// A reset makes everything stored before unfindable. In memory the epoch sees to that. In the tiers
// it is done by name: a space has a tier epoch, a counter, and its keys in the tiers have the name
// that catalog.StoredName makes of it. A reset goes to the next epoch, so nothing written before is found
// again, by whatever way it came to the tier and however late; and as all nodes make the same name
// of the same epoch, they share again as soon as they have heard of it, by markers in the shared
// tiers (markers.go). The epoch is on disk before the reset is done, and outlives the agent: else
// its next life would find what was reset. What the old names hold is collected later (collect.go).
type spaces struct {
	path  string
	write func(path string, k *catalog.Catalog) error
	after time.Duration // CollectAfter

	turning sync.Mutex    // one change of what is kept at a time, which may wait for a disk; taken before mu
	changed chan struct{} // cap 1: something is to be kept, or there is another leftover

	mu        sync.Mutex // a space opens, closes, or gets another name; nobody waits for a disk with it
	kept      *catalog.Catalog
	dirty     bool                           // kept is not what the file says
	unkept    map[pool.Fingerprint]bool      // private spaces that the file does not name yet: without tiers until then
	off       map[pool.Fingerprint]bool      // a reset was not kept: without tiers, opened again too
	failed    map[pool.Fingerprint]bool      // a reset had no new epoch: off until one has
	idle      map[pool.Fingerprint]time.Time // private spaces without an engine: since when
	active    map[pool.Fingerprint]bool      // named spaces with an engine
	retired   map[pool.Fingerprint]bool      // spaces that are collected: without tiers until used
	opened    time.Time
	all       atomic.Pointer[[]*space] // by SpaceID; nil: not open
	adopted   uint64
	again     uint64
	lost      uint64 // leftovers that were not noted
	unused    uint64 // named spaces that were retired
	elsewhere uint64 // of those, spaces that another node was seen to use
	saidLost  uint64 // of keepAlways
	onAdopted func(pool.Fingerprint)
}

// space is one that is open in memory.
type space struct {
	spec   pool.Spec
	groups []group
	now    atomic.Pointer[life]

	prefill prefill
}

// group is what the entries of a group have in common.
type group struct {
	memory int64   // bytes of an entry, as memory rounds them at most
	staged int64   // bytes of an entry's values in staging
	at     []int64 // of each shard's value in an entry's loan
	tokens uint32
	fits   bool // in half of staging
}

// life is a space between two resets.
type life struct {
	stored pool.Fingerprint // its name in the tiers
	epoch  uint32           // in memory; 0 while the reset is under way
	off    bool             // the epoch could not be kept, or the space is being collected: tiers are not used
}

// open reads what an earlier life kept.
func (s *spaces) open(o *Options) (err error) {
	s.path, s.write, s.after, s.kept, s.changed = o.State, catalog.Write, o.CollectAfter, catalog.New(), make(chan struct{}, 1)
	s.unkept, s.off = map[pool.Fingerprint]bool{}, map[pool.Fingerprint]bool{}
	s.failed = map[pool.Fingerprint]bool{}
	s.idle, s.retired = map[pool.Fingerprint]time.Time{}, map[pool.Fingerprint]bool{}
	s.active, s.opened = map[pool.Fingerprint]bool{}, o.Clock()
	s.all.Store(&[]*space{})
	if s.path == "" {
		return nil
	}
	if s.kept, err = catalog.Read(s.path); err != nil {
		return err
	}
	now := o.Clock()
	for fp, e := range s.kept.Spaces {
		if e.Private {
			s.idle[fp] = now // its engine has as long to come back as if it had left just now
		}
	}
	fresh := false
	for name, left := range s.kept.Leftovers {
		if left.Due == 0 { // of format 1
			left.Due, fresh = now.Add(s.after).UnixMilli(), true
			s.kept.Leftovers[name] = left
		}
		switch {
		case left.Unused && o.CollectUnused == 0:
			delete(s.kept.Leftovers, name)
		case left.Unused: // its engine may come back, too
			s.retired[left.Space] = true
			left.Due = max(left.Due, now.Add(s.after).UnixMilli())
			s.kept.Leftovers[name] = left
		}
	}
	if fresh {
		return s.write(s.path, s.kept)
	}
	return nil
}

// get is an open space; nil if it is not.
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
			p.o.Log("", fmt.Sprintf("blocks of %d bytes are too large for staging: they stay in memory", sp.groups[g].memory), nil)
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

// ResetSpace implements pool.Spaces. From its beginning on nothing stored before is found in any
// tier. If the tier epoch cannot be kept on disk, memory begins its new epoch nevertheless, the tiers
// are off for the space until it can be, and the error says so: the next life of the agent would
// find again what was reset, so the caller must not take the reset as done.
func (p *Pool) ResetSpace(id pool.SpaceID) (uint32, error) {
	sp := p.spaces.get(id)
	if sp == nil || len(p.lanes) == 0 {
		return p.memory.ResetSpace(id)
	}
	unkept := p.rename(sp.spec.Fingerprint, p.nextEpoch)
	if unkept != nil {
		p.o.Log("", "a reset is not kept on disk: the tiers are not used for the space until it is", unkept)
	}
	defer p.follow()
	epoch, err := p.turn(id, sp)
	return epoch, errors.Join(err, unkept)
}

// turn starts a new epoch in memory, for a space that has its new name.
func (p *Pool) turn(id pool.SpaceID, sp *space) (uint32, error) {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	p.cancelSpace(id)
	epoch, err := p.memory.ResetSpace(id)
	if p.spaces.get(id) == sp {
		p.spaces.nameLocked(sp, p.memory.Epoch(id))
	}
	return epoch, err
}

// nameLocked lets an open space have the name in the tiers that is kept for it, from an epoch on.
// What has a user is no leftover.
func (s *spaces) nameLocked(sp *space, epoch uint32) {
	fp := sp.spec.Fingerprint
	name := catalog.StoredName(fp, s.kept.Spaces[fp].Epoch)
	off := s.off[fp] || s.unkept[fp] || s.retired[fp]
	if _, left := s.kept.Leftovers[name]; left && !s.retired[fp] {
		delete(s.kept.Leftovers, name)
		s.dirty = true
	}
	sp.now.Store(&life{stored: name, epoch: epoch, off: off})
}

// CloseSpace implements pool.Spaces. What the tiers have of the space stays, and is found when it is opened again.
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
		sp.now.Store(&life{off: true}) // what is under way is of another life, whoever gets the number next
		p.spaces.closedLocked(sp.spec.Fingerprint)
	}
	p.cancelSpace(id)
	return nil
}

// closedLocked forgets that a space was retired, if all of it was collected while it was open.
func (s *spaces) closedLocked(fp pool.Fingerprint) {
	if _, kept := s.kept.Spaces[fp]; !kept && !s.openLocked(fp) {
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

// Stats implements pool.Spaces: those of memory.
func (p *Pool) Stats() pool.Stats { return p.memory.Stats() }

var _ pool.Mapped = (*Pool)(nil)

// Arena is memory's.
func (p *Pool) Arena() (base []byte, fd int) { return p.memory.Arena() }

// key of a shard in the tiers.
func (l *life) key(k *entryKey, shard uint8) pool.Key {
	return pool.Key{Space: l.stored, Group: k.group, Shard: shard, Hash: k.hash}
}

// ownKey of a shard in memory, which its checksum is bound to.
func (s *space) ownKey(k *entryKey, shard uint8) pool.Key {
	return pool.Key{Space: s.spec.Fingerprint, Group: k.group, Shard: shard, Hash: k.hash}
}

// valid is the group of a batch or chain, or nil where the tiers have no part in it.
func (s *space) group(g uint8) *group {
	if s == nil || int(g) >= len(s.groups) || !s.groups[g].fits {
		return nil
	}
	return &s.groups[g]
}

var _ pool.Forgetter = (*Pool)(nil)

// Forget implements pool.Forgetter: a reset of a space that nobody opened yet in this life. It gets another name in the tiers, and memory that
// outlives the agent drops what it has of it.
func (p *Pool) Forget(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		_, err := p.ResetSpace(id)
		return err
	}
	if len(p.lanes) > 0 {
		if err := p.rename(fp, p.nextEpoch); err != nil {
			return err
		}
	}
	defer p.follow()
	return p.forgetMemory(fp)
}

// forgetMemory drops what memory has of a space, which has its new name in the tiers.
func (p *Pool) forgetMemory(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		if sp := p.spaces.get(id); sp != nil {
			_, err := p.turn(id, sp)
			return err
		}
	}
	if m, ok := p.memory.(pool.Forgetter); ok {
		return m.Forget(fp)
	}
	return nil
}

// openID is the number of a space that is open.
func (p *Pool) openID(fp pool.Fingerprint) (pool.SpaceID, bool) {
	for id, sp := range *p.spaces.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			return pool.SpaceID(id), true
		}
	}
	return 0, false
}
