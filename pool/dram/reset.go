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

// Forget implements pool.Memory.
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

// turnOver moves a space to another realm, and to another turn in the file. The old realm
// waits for its sweep.
func (c *core) turnOver(sp *space) bool {
	old := sp.realm
	if !c.newRealm(sp) {
		return false
	}
	c.nextTurn(sp)
	c.end(old)
	return true
}

// Limits of one slice of a sweep, after which it releases the lock: records examined, and dropped.
const (
	sweepLooks = 4096
	sweepDrops = 256
)

// end ends a realm. It is not reused before its sweep has run.
func (c *core) end(realm uint32) {
	if c.realms[realm].space.watched {
		c.notes.lost = true
		c.notes.signal()
	}
	c.realms[realm].over = true
	c.realms[realm].entries++
	c.ended = append(c.ended, realm)
}

// Sweep implements pool.Spaces.
func (p *Pool) Sweep() {
	p.sweeping.Lock() // one at a time: an earlier sweep is finished when this one returns
	defer p.sweeping.Unlock()
	n := 0
	if p.locked(func(c *core) { n = len(c.ended) }); n == 0 {
		return
	}
	for from := uint32(1); from != 0; {
		if !p.locked(func(c *core) { from = c.sweep(from) }) {
			return
		}
	}
	p.locked(func(c *core) {
		for _, realm := range c.ended[:n] {
			c.leaveRealm(realm)
		}
		c.ended = c.ended[n:]
	})
}

// sweep drops entries of ended realms, and returns the record to continue at, 0 at the end.
func (c *core) sweep(from uint32) uint32 {
	to, dropped := min(c.high, from+sweepLooks), 0
	for e := from; e < to; e++ {
		r := &c.recs.All[e]
		if !r.is(flagLive) || r.is(flagDropped) || !c.realms[r.ident.realm()].over {
			continue
		}
		c.drop(e, pool.ByReset)
		c.stats.Dropped++
		if dropped++; dropped == sweepDrops {
			to = e + 1
		}
	}
	if to < c.high {
		return to
	}
	return 0
}
