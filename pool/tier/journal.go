package tier

import "github.com/kvagent/kvagent/pool"

var _ pool.Journal = (*Pool)(nil)

// Watch implements pool.Journal for memory. Without the ability in memory, nothing is noted.
func (p *Pool) Watch(s pool.SpaceID) {
	if j, ok := p.memory.(pool.Journal); ok {
		j.Watch(s)
	}
}

// Changed implements pool.Journal for memory.
func (p *Pool) Changed() <-chan struct{} {
	if j, ok := p.memory.(pool.Journal); ok {
		return j.Changed()
	}
	return nil
}

// Changes implements pool.Journal for memory.
func (p *Pool) Changes(empty []pool.Change) (all []pool.Change, lost bool) {
	if j, ok := p.memory.(pool.Journal); ok {
		return j.Changes(empty)
	}
	return empty[:0], false
}

// Holds implements pool.Journal for memory.
func (p *Pool) Holds(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) (open bool) {
	p.memory.Exists(s, group, h, present)
	return p.spaces.get(s) != nil
}
