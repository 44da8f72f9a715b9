package tier

import "github.com/kvagent/kvagent/pool"

var _ pool.Keeper = (*Pool)(nil)

// PinEach implements pool.Keeper for memory: nothing is fetched from tiers for it. Without the
// ability in memory, nothing is pinned, marked or dropped.
func (p *Pool) PinEach(
	s pool.SpaceID, group uint8, h pool.Hashes, refs []pool.Ref,
) (all []pool.Ref, bytes int64) {
	k, ok := p.memory.(pool.Keeper)
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

// MarkBrief implements pool.Keeper for memory.
func (p *Pool) MarkBrief(s pool.SpaceID, group uint8, h pool.Hashes) {
	if k, ok := p.memory.(pool.Keeper); ok {
		k.MarkBrief(s, group, h)
	}
}

// DropBrief implements pool.Keeper for memory. A tier keeps its copies.
func (p *Pool) DropBrief(s pool.SpaceID, group uint8, h pool.Hashes) int {
	if k, ok := p.memory.(pool.Keeper); ok {
		return k.DropBrief(s, group, h)
	}
	return 0
}
