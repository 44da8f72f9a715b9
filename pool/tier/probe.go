package tier

import (
	"github.com/kvagent/kvagent/pagefault"
	"github.com/kvagent/kvagent/pool"
)

var _ pool.Prober = (*Pool)(nil)

// Probe implements pool.Prober, as far as memory does.
func (p *Pool) Probe(s pool.Slot) bool {
	m, ok := p.memory.(pool.Prober)
	return !ok || m.Probe(s)
}

// reach gives use the bytes of a slot that the caller holds. False: a page of them cannot be had;
// memory has retired it.
func (p *Pool) reach(s pool.Slot, use func(b []byte)) bool {
	if pagefault.Guard(p.arena, nil, func() { use(p.arena[s.Off : s.Off+int64(s.Len)]) }) == nil {
		return true
	}
	p.Probe(s)
	return false
}
