package dram

import "github.com/kvagent/kvagent/pool"

// Stats implements pool.Spaces.
func (p *Pool) Stats() pool.Stats {
	s := p.stats()
	s.Policy = p.advisor.report()
	return s
}

func (p *Pool) stats() pool.Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	s := c.stats
	s.Capacity, s.Ready, s.Used = p.info.Bytes, p.arena.Ready(), c.slabs.UsedBytes()
	s.Reassigned, s.Bad = c.slabs.Reassigned(), c.slabs.BadStats()
	s.Bad.Dropped = c.badDropped
	if f := c.file; f != nil {
		s.FileFull = f.TimesFull()
	}
	if !p.closed {
		s.IndexBytes = c.resident()
	}
	s.Classes = c.slabs.Stats()
	return s
}

// resident is the memory of hash table, headers and slot table that has been touched.
func (c *core) resident() int64 {
	return c.table.Resident() + c.recs.Resident(int(c.high)) + c.lives.Resident(int(c.high)) +
		c.slabs.Resident()
}
