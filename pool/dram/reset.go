package dram

import (
	"fmt"

	"github.com/kvagent/kvagent/pool"
)

var errRealms = fmt.Errorf("dram: %d epochs have entries: %w", maxRealms, pool.ErrTooLarge)

// ResetSpace implements pool.Spaces.
func (p *Pool) ResetSpace(s pool.SpaceID) (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, pool.ErrClosed
	}
	sp := p.core.space(s)
	if sp == nil {
		return 0, notOpen(s)
	}
	return p.core.reset(sp)
}

// reset starts a new epoch of an open space.
func (c *core) reset(sp *space) (epoch uint32, err error) {
	if !c.turnOver(sp) {
		return 0, errRealms
	}
	sp.epoch++
	return sp.epoch, nil
}

var _ pool.Forgetter = (*Pool)(nil)

// Forget implements pool.Forgetter.
func (p *Pool) Forget(f pool.Fingerprint) (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if id, open := p.core.byPrint[f]; open {
		_, err = p.core.reset(p.core.spaces[id])
		return err
	}
	if sp := p.core.unopened[f]; sp != nil && !p.core.turnOver(sp) {
		return errRealms
	}
	return nil
}

// turnOver gives a space another realm, and another generation in the file. The old one waits for its sweep.
func (c *core) turnOver(sp *space) bool {
	old := sp.realm
	if !c.newRealm(sp) {
		return false
	}
	c.turnKept(sp)
	c.end(old)
	return true
}
