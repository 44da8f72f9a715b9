package dram

import (
	"fmt"

	"github.com/kvagent/kvagent/pool"
)

// noRealm is beyond all realms: there is nothing to sweep.
const noRealm = 1<<32 - 1

var errRealms = fmt.Errorf("dram: %d epochs have entries: %w", maxRealms, pool.ErrTooLarge)

// sweepStride is how many records a reset looks at before it lets others have the lock.
const sweepStride = 4096

// ResetSpace implements pool.Spaces. Nothing stored before is found once it has begun; it returns when all memory
// that nobody holds is free again.
func (p *Pool) ResetSpace(s pool.SpaceID) (uint32, error) {
	old, epoch, err := p.turn(s)
	if err != nil {
		return 0, err
	}
	p.sweep(old)
	return epoch, nil
}

// Forget implements pool.Forgetter.
func (p *Pool) Forget(f pool.Fingerprint) error {
	p.mu.Lock()
	id, open := p.core.byPrint[f]
	old, err := p.core.forget(f)
	p.mu.Unlock()
	if open {
		_, err = p.ResetSpace(id)
		return err
	}
	p.sweep(old)
	return err
}

// forget starts a new generation of a space that is not open, and returns the realm that is over.
func (c *core) forget(f pool.Fingerprint) (old uint32, err error) {
	sp := c.unopened[f]
	if sp == nil {
		return noRealm, nil
	}
	old, ok := c.turnOver(sp)
	if !ok {
		return noRealm, errRealms
	}
	return old, nil
}

// sweep drops all entries of a realm, and lets others have the lock meanwhile.
func (p *Pool) sweep(realm uint32) {
	for from := uint32(1); from != 0; {
		p.mu.Lock()
		from = p.core.sweep(realm, from)
		p.mu.Unlock()
	}
}

// turn starts the new epoch.
func (p *Pool) turn(s pool.SpaceID) (old, epoch uint32, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.core
	if p.closed {
		return 0, 0, pool.ErrClosed
	}
	if int(s) >= len(c.spaces) {
		return 0, 0, fmt.Errorf("dram: space %d is not open", s)
	}
	sp := c.spaces[s]
	old, ok := c.turnOver(sp)
	if !ok {
		return 0, 0, errRealms
	}
	sp.epoch++
	return old, sp.epoch, nil
}

// turnOver gives a space another realm, and another generation in the file. The old one waits for its sweep.
func (c *core) turnOver(sp *space) (old uint32, ok bool) {
	old = sp.realm
	if !c.newRealm(sp) {
		return noRealm, false
	}
	c.turnKept(sp)
	c.end(old)
	return old, true
}

// end says that a realm is over. It is not used again before its sweep has run.
func (c *core) end(realm uint32) {
	c.realms[realm].over = true
	c.realms[realm].entries++
}

// sweep drops the entries of a realm among the next records, and returns where to go on, 0 at the end.
func (c *core) sweep(realm, from uint32) uint32 {
	if int(realm) >= len(c.realms) {
		return 0 // closed, or none
	}
	to := min(c.high, from+sweepStride)
	for e := from; e < to; e++ {
		r := &c.recs.all[e]
		if r.is(flagLive) && !r.is(flagDropped) && r.ident.realm() == realm {
			c.drop(e)
			c.stats.Dropped++
		}
	}
	if to < c.high {
		return to
	}
	c.leaveRealm(realm)
	return 0
}
