package tier

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// A space and its name in the tiers.
//
// A reset makes everything stored before unfindable. In memory the epoch sees to that. In the tiers it is done by name: the first reset of a space on this node gives it a
// random salt, each further one another, and from then on its keys in the tiers have the fingerprint SHA-256(fingerprint, salt)[:16]. So nothing written before the reset is found again, by whatever
// way it came to the tier and however late; and what this node writes under the new name, nobody else finds: nodes share a space until one of them resets it. The salt is on disk before the reset
// is done, and outlives the agent: else its next life would find what was reset.
type spaces struct {
	path  string
	write func(path string, salts map[pool.Fingerprint]salt) error

	turning sync.Mutex // one reset at a time, which may wait for a disk; taken before mu

	mu    sync.Mutex // a space opens, closes, or gets another name; nobody waits for a disk with it
	salts map[pool.Fingerprint]salt
	off   map[pool.Fingerprint]bool // a reset was not kept: without tiers, also when the space was closed and is opened again
	all   atomic.Pointer[[]*space]  // by SpaceID; nil: not open
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
	off    bool             // the salt could not be kept: tiers are not used
}

func (s *spaces) open(path string) (err error) {
	s.path, s.write, s.salts, s.off = path, writeSalts, map[pool.Fingerprint]salt{}, map[pool.Fingerprint]bool{}
	s.all.Store(&[]*space{})
	if path != "" {
		s.salts, err = readSalts(path)
	}
	return err
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
		out.staged += roundUp(int64(n) + headerBytes)
	}
	out.tokens, out.fits = g.BlockTokens, out.staged <= staging/2
	return out
}

// storedName is the name of a space in the tiers.
func storedName(fp pool.Fingerprint, s salt) pool.Fingerprint {
	if s == (salt{}) {
		return fp
	}
	sum := sha256.Sum256(append(fp[:], s[:]...))
	return pool.Fingerprint(sum[:16])
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
		sp.groups = append(sp.groups, newGroup(&spec.Groups[g], int64(len(p.o.Staging.base))))
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
	return id, nil
}

// ResetSpace implements pool.Spaces. From its begin on nothing stored before is found in any tier; a salt that cannot be kept turns the tiers off for the space, and is an error
// behind which the new epoch holds nevertheless.
func (p *Pool) ResetSpace(id pool.SpaceID) (uint32, error) {
	sp := p.spaces.get(id)
	if sp == nil || len(p.lanes) == 0 {
		return p.memory.ResetSpace(id)
	}
	if unkept := p.rename(sp.spec.Fingerprint); unkept != nil {
		p.o.Log("", "a reset is not kept on disk: the tiers are not used for the space any more", unkept)
	}
	return p.turn(id, sp)
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
func (s *spaces) nameLocked(sp *space, epoch uint32) {
	fp := sp.spec.Fingerprint
	sp.now.Store(&life{stored: storedName(fp, s.salts[fp]), epoch: epoch, off: s.off[fp]})
}

// CloseSpace implements pool.Spaces. What the tiers have of the space stays, and is found when it is opened again.
func (p *Pool) CloseSpace(id pool.SpaceID) error {
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	if err := p.memory.CloseSpace(id); err != nil {
		return err
	}
	all := append([]*space(nil), *p.spaces.all.Load()...)
	if sp := all[id]; sp != nil {
		sp.now.Store(&life{off: true}) // what is under way is of another life, whoever gets the number next
	}
	all[id] = nil
	p.spaces.all.Store(&all)
	p.cancelSpace(id)
	return nil
}

// Sweep implements pool.Spaces.
func (p *Pool) Sweep() { p.memory.Sweep() }

// rename gives a space another name in the tiers, and keeps it: once it is on disk, the space goes on under it. Until then, and if it cannot be kept, the tiers
// are not used for the space. Only resets wait for the disk.
func (p *Pool) rename(fp pool.Fingerprint) error {
	s := &p.spaces
	s.turning.Lock()
	defer s.turning.Unlock()
	salts, err := s.salted(fp)
	if err == nil && s.path != "" {
		err = s.write(s.path, salts)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off[fp] = err != nil
	return err
}

// salted gives a space a new salt, and all salts as they are to be kept. What is open of the space leaves the tiers, and what is opened meanwhile does not enter.
func (s *spaces) salted(fp pool.Fingerprint) (all map[pool.Fingerprint]salt, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.off[fp] = true
	for _, sp := range *s.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			sp.now.Store(&life{})
		}
	}
	fresh, err := newSalt()
	if err != nil {
		return nil, err
	}
	if _, known := s.salts[fp]; !known && len(s.salts) >= maxSalts {
		return nil, errors.New("too many spaces were reset")
	}
	s.salts[fp] = fresh
	return maps.Clone(s.salts), nil
}

// Epoch implements pool.Spaces.
func (p *Pool) Epoch(id pool.SpaceID) uint32 { return p.memory.Epoch(id) }

// SetPressure implements pool.Spaces.
func (p *Pool) SetPressure(f func(need int64) bool) { p.memory.SetPressure(f) }

// Stats implements pool.Spaces: those of memory.
func (p *Pool) Stats() pool.Stats { return p.memory.Stats() }

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
