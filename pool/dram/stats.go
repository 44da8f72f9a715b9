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
	s.Capacity, s.Ready, s.Used = p.info.Bytes, p.ready.Load(), c.slabs.used
	s.Reassigned, s.Bad = c.slabs.moved, c.slabs.badStats()
	if f := c.slabs.file; f != nil {
		s.FileFull = f.refused
	}
	if !p.closed {
		s.IndexBytes = c.resident()
	}
	for _, k := range c.slabs.class {
		if k.slabs > 0 {
			s.Classes = append(s.Classes, pool.ClassStats{
				SlotBytes: int64(k.bytes), Slabs: k.slabs, Used: k.used, Slots: k.slabs * int(k.perSlab),
			})
		}
	}
	return s
}

// resident is the memory of hash table, headers and slot table that has been touched.
func (c *core) resident() int64 {
	return c.table.resident() + c.recs.resident(int(c.high)) + c.lives.resident(int(c.high)) +
		c.slabs.cells.resident(int(c.slabs.spans.high))
}
