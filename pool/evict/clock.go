package evict

import "github.com/kvagent/kvagent/pool"

// Limits of how time goes.
const (
	longestGap = 5 * 60 * 1000 // ms that go by at most between two things heard: nothing is used in a pause
	perUnit    = 1             // ms that go by at least for unitTokens tokens looked up
)

// clock is the time in ms by which blocks age: that of the pool, without long pauses, and not
// slower than blocks come. It never goes back.
type clock struct {
	now     int64
	skipped int64 // ms of pauses left out
	heard   bool
}

// hear is the time at which the pool's clock shows ns.
func (c *clock) advance(ns int64) uint32 {
	at := ns/1e6 - c.skipped
	if !c.heard {
		c.heard, c.skipped, at = true, at-c.now, c.now
	}
	if pause := at - c.now; pause > longestGap {
		c.skipped += pause - longestGap
		at = c.now + longestGap
	}
	c.now = max(c.now, at)
	return uint32(c.now)
}

// look is the time of a look-up, some ms or more after all before it.
func (c *clock) advanceBy(u *pool.Use, steps int) uint32 {
	before, tokens := c.now, int64(u.BlockTokens)
	if tokens == 0 {
		tokens = unitTokens
	}
	c.advance(u.Now)
	c.now = max(c.now, before+max(1, int64(steps), int64(len(u.Prints))*tokens/unitTokens*perUnit))
	return uint32(c.now)
}

// atLeast is the time, which goes on to at if that is later.
func (c *clock) atLeast(at uint32) uint32 {
	if now := uint32(c.now); before(now, at) {
		c.now += int64(at - now)
	}
	return uint32(c.now)
}
