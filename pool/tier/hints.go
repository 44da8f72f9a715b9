package tier

import (
	"time"

	"github.com/kvagent/kvagent/pool"
)

var _ pool.Advised = (*Pool)(nil)

// PinEach implements pool.Advised for memory: nothing is fetched from tiers for it. Without the
// ability in memory, nothing is pinned, marked or dropped.
func (p *Pool) PinEach(
	s pool.SpaceID, group uint8, h pool.Hashes, refs []pool.Ref,
) (all []pool.Ref, bytes int64) {
	k, ok := p.memory.(pool.Advised)
	if !ok {
		return refs, 0
	}
	base := len(refs)
	refs, bytes = k.PinEach(s, group, h, refs)
	if cut := p.dropAmbiguous(refs[base:]); cut >= 0 {
		refs = refs[:base+cut]
	}
	return refs, bytes
}

// MarkUnused implements pool.Advised for memory.
func (p *Pool) MarkUnused(s pool.SpaceID, group uint8, h pool.Hashes, brief bool) {
	if k, ok := p.memory.(pool.Advised); ok {
		k.MarkUnused(s, group, h, brief)
	}
}

// CountUnused implements pool.Advised for memory.
func (p *Pool) CountUnused(s pool.SpaceID, group uint8, h pool.Hashes) (stored, unused int, bytes int64) {
	if k, ok := p.memory.(pool.Advised); ok {
		return k.CountUnused(s, group, h)
	}
	return 0, 0, 0
}

// Advise implements pool.Advised for memory.
func (p *Pool) Advise(s pool.SpaceID, group uint8, h pool.Hashes, a pool.Advice, lasts time.Duration) {
	if k, ok := p.memory.(pool.Advised); ok {
		k.Advise(s, group, h, a, lasts)
	}
}

// DropUnused implements pool.Advised for memory. A tier keeps its copies.
func (p *Pool) DropUnused(s pool.SpaceID, group uint8, h pool.Hashes) int {
	if k, ok := p.memory.(pool.Advised); ok {
		return k.DropUnused(s, group, h)
	}
	return 0
}
