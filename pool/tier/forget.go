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
	if err := p.rename(fp); err != nil {
		return err
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

// rename gives a space another name in the tiers, from when it is opened on.
func (p *Pool) rename(fp pool.Fingerprint) error {
	if len(p.lanes) == 0 {
		return nil
	}
	p.spaces.mu.Lock()
	defer p.spaces.mu.Unlock()
	_, err := p.spaces.salted(fp)
	return err
}
