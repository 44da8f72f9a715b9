package dram

import "github.com/kvagent/kvagent/pool"

var _ pool.SpaceCounter = (*Pool)(nil)

// SpaceEntries implements pool.SpaceCounter: entries of the current epoch, those that lack shards included.
func (p *Pool) SpaceEntries(s pool.SpaceID) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if int(s) >= len(p.core.spaces) {
		return 0
	}
	return int64(p.core.realms[p.core.spaces[s].realm].entries)
}
