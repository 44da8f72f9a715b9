package evict

import "github.com/kvagent/kvagent/pool"

// Limits of the passing of time.
const (
	longestGap = 5 * 60 * 1000 // ms that pass at most between two events: nothing is used in a pause
	perUnit    = 1             // ms that pass at least for unitTokens tokens looked up
)

// clock is the time in ms by which blocks age: the pool's time without long pauses, advanced at a
// minimum rate per block looked up. It is monotonic.
type clock struct {
	now     int64
	skipped int64 // ms of pauses left out
	heard   bool
}

// advance returns the time for a pool's clock in ns.
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

// peek returns the time for a pool's clock in ns, and leaves the clock as it is.
func (c *clock) peek(ns int64) uint32 {
	copied := *c
	return copied.advance(ns)
}

// advanceBy returns the time of a look-up, at least steps ms after all before it.
func (c *clock) advanceBy(u *pool.Use, steps int) uint32 {
	before, tokens := c.now, int64(u.BlockTokens)
	if tokens == 0 {
		tokens = unitTokens
	}
	c.advance(u.Now)
	c.now = max(c.now, before+max(1, int64(steps), int64(len(u.Prints))*tokens/unitTokens*perUnit))
	return uint32(c.now)
}

// atLeast advances the time to at if that is later, and returns it.
func (c *clock) atLeast(at uint32) uint32 {
	if now := uint32(c.now); before(now, at) {
		c.now += int64(at - now)
	}
	return uint32(c.now)
}
