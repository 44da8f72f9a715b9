package mem

import (
	"bytes"
	"fmt"
	"reflect"

	"github.com/kvagent/kvagent/pool"
)

// OpenSpace implements pool.Spaces.
func (p *Pool) OpenSpace(s pool.Spec) (pool.SpaceID, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.check(&s); err != nil {
		return 0, err
	}
	if id, ok := p.byPrint[s.Fingerprint]; ok {
		have := p.spaces[id].spec
		if !bytes.Equal(have.Identity, s.Identity) || have.Shards != s.Shards ||
			!reflect.DeepEqual(have.Groups, s.Groups) {
			return 0, pool.ErrIdentity
		}
		return id, nil
	}
	if len(p.byPrint) == pool.MaxSpaces {
		return 0, fmt.Errorf("%d spaces are open: %w", pool.MaxSpaces, pool.ErrTooLarge)
	}
	id := pool.SpaceID(len(p.spaces))
	p.spaces = append(p.spaces, &space{spec: clone(s), epoch: s.OpeningEpoch()})
	p.byPrint[s.Fingerprint] = id
	return id, nil
}

func (p *Pool) check(s *pool.Spec) error {
	if s.Shards < 1 || s.Shards > pool.MaxShards {
		return fmt.Errorf("mem: Shards is %d, must be 1 to %d", s.Shards, pool.MaxShards)
	}
	if len(s.Groups) < 1 || len(s.Groups) > pool.MaxGroups {
		return fmt.Errorf("mem: Groups has %d, must have 1 to %d", len(s.Groups), pool.MaxGroups)
	}
	for g, group := range s.Groups {
		if len(group.ShardBytes) != s.Shards {
			return fmt.Errorf(
				"mem: Groups[%d].ShardBytes has %d, must have Shards=%d", g, len(group.ShardBytes), s.Shards,
			)
		}
		for i, n := range group.ShardBytes {
			if n == 0 {
				return fmt.Errorf("mem: Groups[%d].ShardBytes[%d] is 0, must be above 0", g, i)
			}
			if slotBytes(n) > p.stats.Capacity {
				return fmt.Errorf(
					"mem: Groups[%d].ShardBytes[%d] is %d, the pool has %d: %w", g, i, n, p.stats.Capacity,
					pool.ErrTooLarge,
				)
			}
		}
	}
	return nil
}

func clone(s pool.Spec) pool.Spec {
	s.Identity = bytes.Clone(s.Identity)
	groups := make([]pool.Group, len(s.Groups))
	for i, g := range s.Groups {
		g.ShardBytes = append([]uint32(nil), g.ShardBytes...)
		groups[i] = g
	}
	s.Groups = groups
	return s
}

// ResetSpace implements pool.Spaces.
func (p *Pool) ResetSpace(s pool.SpaceID) (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.isOpen(s) {
		return 0, fmt.Errorf("space %d is not open", s)
	}
	p.spaces[s].epoch++
	p.dropAll(s)
	return p.spaces[s].epoch, nil
}

// CloseSpace implements pool.Spaces.
func (p *Pool) CloseSpace(s pool.SpaceID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.isOpen(s) {
		return fmt.Errorf("space %d is not open", s)
	}
	p.spaces[s].closed = true
	delete(p.byPrint, p.spaces[s].spec.Fingerprint)
	p.dropAll(s)
	return nil
}

// Sweep implements pool.Spaces. It has nothing to do.
func (p *Pool) Sweep() {}

func (p *Pool) isOpen(s pool.SpaceID) bool { return int(s) < len(p.spaces) && !p.spaces[s].closed }

func (p *Pool) dropAll(s pool.SpaceID) {
	for _, e := range p.entries {
		if e.key.space == s {
			p.drop(e)
			p.stats.Dropped++
		}
	}
}

// Epoch implements pool.Spaces; it returns 0 for a space that is not open.
func (p *Pool) Epoch(s pool.SpaceID) uint32 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.isOpen(s) {
		return 0
	}
	return p.spaces[s].epoch
}

// SetPressure implements pool.Spaces.
func (p *Pool) SetPressure(f func(need int64) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pressure = f
}

// Stats implements pool.Spaces. Slots have no classes here.
func (p *Pool) Stats() pool.Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	for _, e := range p.refs {
		s.Used += e.bytes()
		if e.pins > 0 {
			s.Pinned += e.bytes()
			s.PinnedEntries++
		}
		switch {
		case e.dropped:
		case e.place != nil:
			s.Entries++
		default:
			s.Partial++
		}
	}
	return s
}
