package dram

import "github.com/kvagent/kvagent/pool"

// OpenOwner implements pool.Memory.
func (p *Pool) OpenOwner(name string) (pool.Owner, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, pool.ErrClosed
	}
	return p.core.owners.Open(name)
}

// CloseOwner implements pool.Memory.
func (p *Pool) CloseOwner(o pool.Owner) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.core.owners.Close(o)
}

// SetBudget implements pool.Memory.
func (p *Pool) SetBudget(o pool.Owner, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.core.owners.SetBudget(o, bytes)
}

// afford reports whether an owner's budget has room for so many bytes, after evicting of its own
// entries as many as that takes. The entry that the new one is to follow stays.
func (c *core) afford(o pool.Owner, bytes int64, parent uint32) bool {
	if o == 0 || c.owners.Fits(o, bytes) {
		return true
	}
	if !c.owners.MayFit(o, bytes) {
		return false // however many were evicted
	}
	c.keep = parent
	defer func() { c.keep = none }()
	for ; !c.owners.Fits(o, bytes); c.work.ownedOut-- {
		e := c.owners.Victim(o, c, &c.work.owned)
		if e == none || c.work.ownedOut == 0 {
			return false
		}
		c.owners.Evicted(o, c.group(c.recs.All[e].ident).bytes)
		c.evict(e, pool.ByBudget)
	}
	return true
}

// give makes a new entry the owner's, and returns the entry that the owner's next one of the batch
// is to be older than: a suffix goes before its prefix.
func (c *core) give(e uint32, o pool.Owner, bytes int64, above uint32) uint32 {
	if e == none || o == 0 || !c.owners.Own(e, o, bytes, above) {
		return above
	}
	c.recs.All[e].hold |= flagOwned
	return e
}
