package tier

import "github.com/kvagent/kvagent/pool"

var _ pool.Forgetter = (*Pool)(nil)

// Forget implements pool.Forgetter: a reset of a space that nobody opened yet in this life. It gets another name in the tiers, and memory that
// outlives the agent drops what it has of it.
func (p *Pool) Forget(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		_, err := p.ResetSpace(id)
		return err
	}
	if len(p.lanes) > 0 {
		if err := p.rename(fp, p.nextEpoch); err != nil {
			return err
		}
	}
	defer p.follow()
	return p.forgetMemory(fp)
}

// forgetMemory drops what memory has of a space, which has its new name in the tiers.
func (p *Pool) forgetMemory(fp pool.Fingerprint) error {
	if id, open := p.openID(fp); open {
		if sp := p.spaces.get(id); sp != nil {
			_, err := p.turn(id, sp)
			return err
		}
	}
	if m, ok := p.memory.(pool.Forgetter); ok {
		return m.Forget(fp)
	}
	return nil
}

// openID is the number of a space that is open.
func (p *Pool) openID(fp pool.Fingerprint) (pool.SpaceID, bool) {
	for id, sp := range *p.spaces.all.Load() {
		if sp != nil && sp.spec.Fingerprint == fp {
			return pool.SpaceID(id), true
		}
	}
	return 0, false
}
