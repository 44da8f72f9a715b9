package dram

import (
	"fmt"

	"github.com/kvagent/kvagent/pool"
)

// sweepStride is how many records a reset looks at before it lets others have the lock.
const sweepStride = 4096

// ResetSpace implements pool.Spaces. Nothing stored before is found once it has begun; it returns when all memory
// that nobody holds is free again.
func (p *Pool) ResetSpace(s pool.SpaceID) (uint32, error) {
	old, epoch, err := p.turn(s)
	if err != nil {
		return 0, err
	}
	for from := uint32(1); from != 0; {
		p.mu.Lock()
		from = p.core.sweep(old, from)
		p.mu.Unlock()
	}
	return epoch, nil
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
	old = sp.realm
	if !c.newRealm(sp) {
		return 0, 0, fmt.Errorf("dram: %d epochs have entries: %w", maxRealms, pool.ErrTooLarge)
	}
	sp.epoch++
	c.realms[old].over = true
	// A realm must not be used again while its sweep runs.
	c.realms[old].entries++
	return old, sp.epoch, nil
}

// sweep drops the entries of a realm among the next records, and returns where to go on, 0 at the end.
func (c *core) sweep(realm, from uint32) uint32 {
	if int(realm) >= len(c.realms) {
		return 0 // closed
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
