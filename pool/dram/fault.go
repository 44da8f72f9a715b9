package dram

import "github.com/kvagent/kvagent/pagefault"

// FlipByte flips one bit of a stored block, so that a test can prove that wrong bytes are seen: in the middle of
// shard 0 of the nth entry from the most recently used one on. False if there are not so many that nobody pins.
func (p *Pool) FlipByte(nth int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	if p.closed {
		return false
	}
	e := c.recent.newest
	for ; nth > 0 && e != none; nth-- {
		e = c.recs.All[e].older
	}
	if e == none {
		return false
	}
	s := c.slot(e, 0)
	return pagefault.Guard(p.base, nil, func() { p.base[s.Off+int64(s.Len)/2] ^= 1 }) == nil
}
