package dram

import "github.com/kvagent/kvagent/pool"

var _ pool.SpaceCounter = (*Pool)(nil)

// SpaceEntries implements pool.SpaceCounter: entries of the current epoch, those that lack shards included.
func (p *Pool) SpaceEntries(s pool.SpaceID) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if sp := p.core.space(s); sp != nil {
		return int64(p.core.realms[sp.realm].entries)
	}
	return 0
}
