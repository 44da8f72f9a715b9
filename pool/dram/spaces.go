package dram

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/kvagent/kvagent/pool"
)

// space is an open space. Its entries carry the number of its realm. A reset gives it another
// realm, so that nothing of the old one is found from then on.
type space struct {
	spec   pool.Spec
	epoch  uint32
	realm  uint32
	groups []group

	id      pool.SpaceID
	watched bool // its entries are noted

	record int    // in the pool's file; noRecord: none
	turn   uint32 // in that record: like an epoch, but never restarts as long as the file exists
}

// group is what entries of one group of a space need.
type group struct {
	classes []int32 // per shard
	bytes   int64   // slots of all shards
	full    uint16  // shards
	kind    uint8   // as the policy distinguishes entries
	tokens  uint32  // of a block
}

// realm is one epoch of a space.
type realm struct {
	space   *space
	entries int
	over    bool
}

// group returns the group of an entry, also if its epoch has ended.
func (c *core) group(id ident) *group { return &c.realms[id.realm()].space.groups[id.group()] }

func (c *core) space(s pool.SpaceID) *space {
	if int(s) >= len(c.spaces) {
		return nil
	}
	return c.spaces[s]
}

// identOf returns what the entries of a batch have in common.
func (c *core) identOf(s pool.SpaceID, g uint8, hashLen int) (id ident, sp *space, ok bool) {
	sp = c.space(s)
	if sp == nil || hashLen < 1 || hashLen > pool.MaxHashLen {
		return 0, nil, false
	}
	if int(g) >= len(sp.groups) {
		return 0, nil, false
	}
	return makeIdent(sp.realm, g, hashLen), sp, true
}

// OpenSpace implements pool.Spaces.
func (p *Pool) OpenSpace(s pool.Spec) (pool.SpaceID, error) {
	if err := checkSpec(&s, p.info.SlabBytes); err != nil {
		return 0, err
	}
	kept := true
	defer func() { // after the lock
		if !kept && p.onNotKept != nil {
			p.onNotKept(s.Fingerprint)
		}
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	if p.closed {
		return 0, pool.ErrClosed
	}
	if id, ok := c.byPrint[s.Fingerprint]; ok {
		if !sameSpec(&c.spaces[id].spec, &s) {
			return 0, pool.ErrIdentity
		}
		return id, nil
	}
	if len(c.byPrint) == pool.MaxSpaces {
		return 0, fmt.Errorf("dram: %d spaces are open: %w", pool.MaxSpaces, pool.ErrTooLarge)
	}
	sp, err := c.takeSpace(&s)
	if err != nil {
		return 0, err
	}
	id := pool.SpaceID(len(c.spaces))
	sp.id = id
	c.spaces = append(c.spaces, sp)
	c.byPrint[s.Fingerprint] = id
	kept = c.file == nil || sp.record != noRecord
	return id, nil
}

// takeSpace returns the file's space of this spec, or a new one. If the file has another space with
// the same fingerprint, that is unused by now and is dropped.
func (c *core) takeSpace(s *pool.Spec) (*space, error) {
	kept := c.unopened[s.Fingerprint]
	if kept != nil && sameSpec(&kept.spec, s) {
		kept.epoch = s.OpeningEpoch()
		delete(c.unopened, s.Fingerprint)
		return kept, nil
	}
	sp := c.newSpace(s)
	if !c.newRealm(sp) {
		return nil, errRealms
	}
	if kept != nil {
		delete(c.unopened, s.Fingerprint)
		c.leaveSpace(kept)
	}
	c.persistSpace(sp)
	return sp, nil
}

// leaveSpace drops a space: it frees its record in the file and ends its realm.
func (c *core) leaveSpace(sp *space) {
	c.nextTurn(sp)
	if f := c.file; f != nil && sp.record != noRecord {
		f.Touch(func() { f.SpaceAt(sp.record).Remove() })
	}
	c.end(sp.realm)
}

// CloseSpace implements pool.Spaces.
func (p *Pool) CloseSpace(s pool.SpaceID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	sp := p.core.space(s)
	if sp == nil {
		return notOpen(s)
	}
	p.core.spaces[s] = nil
	delete(p.core.byPrint, sp.spec.Fingerprint)
	p.core.leaveSpace(sp)
	return nil
}

func notOpen(s pool.SpaceID) error { return fmt.Errorf("dram: space %d is not open", s) }

func (c *core) newSpace(s *pool.Spec) *space {
	sp := &space{spec: *s, epoch: s.OpeningEpoch(), record: noRecord}
	for _, g := range s.Groups {
		sp.groups = append(sp.groups, c.newGroup(g))
	}
	return sp
}

func (c *core) newGroup(spec pool.Group) (g group) {
	for _, n := range spec.ShardBytes {
		id := c.slabs.classOf(n)
		g.classes = append(g.classes, id)
		g.bytes += c.slabs.slotBytes(id)
	}
	g.full = uint16(len(spec.ShardBytes))
	g.kind, g.tokens = c.kindOf(g.classes), spec.BlockTokens
	return g
}

// newRealm assigns a space a realm without entries.
func (c *core) newRealm(sp *space) bool {
	fresh := realm{space: sp}
	if n := len(c.idle); n > 0 {
		sp.realm, c.idle = c.idle[n-1], c.idle[:n-1]
		c.realms[sp.realm] = fresh
		return true
	}
	if len(c.realms) == maxRealms {
		return false
	}
	sp.realm = uint32(len(c.realms))
	c.realms = append(c.realms, fresh)
	return true
}

func (c *core) leaveRealm(n uint32) {
	r := &c.realms[n]
	r.entries--
	if r.over && r.entries == 0 {
		c.idle = append(c.idle, n)
	}
}

func checkSpec(s *pool.Spec, slabBytes int64) error {
	if s.Shards < 1 || s.Shards > pool.MaxShards {
		return fmt.Errorf("dram: Shards is %d, must be 1 to %d", s.Shards, pool.MaxShards)
	}
	if len(s.Groups) < 1 || len(s.Groups) > pool.MaxGroups {
		return fmt.Errorf("dram: Groups has %d elements, must have 1 to %d", len(s.Groups), pool.MaxGroups)
	}
	for g, group := range s.Groups {
		if len(group.ShardBytes) != s.Shards {
			return fmt.Errorf(
				"dram: Groups[%d].ShardBytes has %d elements, must have Shards = %d", g, len(group.ShardBytes),
				s.Shards,
			)
		}
		for i, n := range group.ShardBytes {
			if n == 0 {
				return fmt.Errorf("dram: Groups[%d].ShardBytes[%d] is 0, must be above 0", g, i)
			}
			if int64(n) > slabBytes {
				return fmt.Errorf("dram: Groups[%d].ShardBytes[%d] is %d bytes, a slab has %d (option SlabBytes): %w",
					g, i, n, slabBytes, pool.ErrTooLarge)
			}
		}
	}
	return nil
}

func sameSpec(a, b *pool.Spec) bool {
	return bytes.Equal(a.Identity, b.Identity) && a.Shards == b.Shards &&
		slices.EqualFunc(a.Groups, b.Groups, func(x, y pool.Group) bool {
			return x.BlockTokens == y.BlockTokens && slices.Equal(x.ShardBytes, y.ShardBytes)
		})
}

// Epoch implements pool.Spaces; it returns 0 for a space that is not open.
func (p *Pool) Epoch(s pool.SpaceID) (epoch uint32) {
	p.locked(func(c *core) {
		if sp := c.space(s); sp != nil {
			epoch = sp.epoch
		}
	})
	return epoch
}

// SetPressure implements pool.Spaces.
func (p *Pool) SetPressure(f func(need int64) bool) { p.locked(func(c *core) { c.pressure = f }) }

// Stats implements pool.Spaces.
func (p *Pool) Stats() pool.Stats {
	s := p.stats()
	if s.Policy.Name = "lru"; p.advisor != nil {
		s.Policy = p.advisor.Report()
	}
	return s
}

func (p *Pool) stats() pool.Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	s := c.stats
	s.Capacity, s.Ready, s.Used = p.info.Bytes, p.arena.Ready(), c.slabs.used
	s.Reassigned, s.Bad = c.slabs.moved, c.slabs.bad
	if f := c.file; f != nil {
		s.FileFull, s.Bad.Faults = f.TimesFull(), f.Faulted()
	}
	s.Classes = c.slabs.stats()
	s.Owners = c.owners.stats()
	return s
}

// SpaceEntries implements pool.Memory. It counts those of this epoch, also without all shards.
func (p *Pool) SpaceEntries(s pool.SpaceID) (n int64) {
	p.locked(func(c *core) {
		if sp := c.space(s); sp != nil {
			n = int64(c.realms[sp.realm].entries)
		}
	})
	return n
}

// maxNotes bounds the names of entries that wait to be taken: 40 bytes each, in two lists.
const maxNotes = 1 << 14

// notes are the entries of watched spaces that came or went. The pool's lock guards them.
type notes struct {
	list    []pool.Change // nil: no space is watched
	lost    bool
	changed chan struct{} // cap 1: there is something to take
}

// note notes an entry that has become visible, or is about to be dropped.
func (c *core) note(e uint32) {
	if c.notes.list == nil {
		return
	}
	r := &c.recs.All[e]
	m := &c.realms[r.ident.realm()]
	if !m.space.watched || m.over {
		return
	}
	if len(c.notes.list) == maxNotes {
		c.notes.lost = true
		return
	}
	c.notes.list = append(c.notes.list,
		pool.Change{Space: m.space.id, Group: r.ident.group(), Hash: r.hash.Bytes(r.ident.hashLen())})
	c.notes.signal()
}

func (n *notes) signal() {
	select {
	case n.changed <- struct{}{}:
	default:
	}
}

// Watch implements pool.Journal.
func (p *Pool) Watch(s pool.SpaceID) {
	p.locked(func(c *core) {
		if sp := c.space(s); sp != nil {
			sp.watched = true
			if c.notes.list == nil {
				c.notes.list = make([]pool.Change, 0, maxNotes)
			}
		}
	})
}

// Changed implements pool.Journal.
func (p *Pool) Changed() <-chan struct{} { return p.core.notes.changed }

// Changes implements pool.Journal. It exchanges two lists: its time does not depend on the notes.
func (p *Pool) Changes(empty []pool.Change) (all []pool.Change, lost bool) {
	if cap(empty) < maxNotes {
		empty = make([]pool.Change, 0, maxNotes)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n := &p.core.notes
	all, lost = n.list, n.lost
	n.list, n.lost = empty[:0], false
	return all, lost
}

// Holds implements pool.Journal.
func (p *Pool) Holds(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) (open bool) {
	p.Exists(s, group, h, present)
	p.locked(func(c *core) { open = c.space(s) != nil })
	return open
}
